"""FP8 products of libraries: ``torch._scaled_mm``, and cuBLASLt called directly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.contenders.cublaslt import Matmul, scales_where_read
from lightning_fp8.numerics.scaled import ScaledTensor


def scaled_mm(
    left: ScaledTensor, right: ScaledTensor, dtype: torch.dtype, fast: bool, out: Tensor | None
) -> Callable[[], Tensor]:
    """``left [m, k] right [n, k]ᵀ`` by torch; if ``out`` is given, torch adds the result to it in a second op."""
    a, b = left.data, right.data.t()
    scale_a, scale_b = map(scales_where_read, (left, right))
    scale_b = scale_b.t() if scale_b.dim() == 2 else scale_b

    def call() -> Tensor:
        result = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
        return result if out is None else out.add_(result)

    return call


def cublaslt(left: ScaledTensor, right: ScaledTensor, dtype: torch.dtype, fast: bool, out: Tensor | None) -> Matmul:
    """The same by cuBLASLt, which adds to ``out`` itself (``beta=1``)."""
    result = torch.empty(len(left.data), len(right.data), dtype=dtype, device=left.data.device) if out is None else out
    return Matmul(left, right, result, fast=fast, beta=0.0 if out is None else 1.0)
