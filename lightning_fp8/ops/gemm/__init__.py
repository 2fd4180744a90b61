"""GEMMs of FP8 operands: ``scaled_mm`` and ``scaled_mm_accumulate``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.gemm import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.gemm import reference as _reference  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.gemm import schema as _schema  # noqa: F401  (defines the ops)
from lightning_fp8.ops.gemm.options import format_scaled_mm_options
from lightning_fp8.scaled import ScaledTensor

_scaled_mm = op("scaled_mm")
_scaled_mm_observed = op("scaled_mm_observed")
_scaled_mm_accumulate = op("scaled_mm_accumulate")


def scaled_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """``a @ bᵀ + bias`` of two K-major FP8 operands, accumulated in float32, rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        bias: ``[N]``, added before rounding.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: allow the tensor core's shorter accumulator (a hint; the CPU has none).
        amax: float32 ``[]``, raised to the largest magnitude of the result, as :func:`observe` would.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError, ValueError: the contractions differ; ``bias`` or ``amax`` of another dtype or shape, or elsewhere.
    """
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(f"out_dtype={out_dtype} must be one of {', '.join(map(str, HIGH_PRECISION))}")
    _check_contractions(a, b)
    options_text = format_scaled_mm_options(a.layout, b.layout, out_dtype, fast_accum)
    arguments = a.data, a.scale_inv, b.data, b.scale_inv, options_text, bias
    return _scaled_mm(*arguments) if amax is None else _scaled_mm_observed(*arguments, amax)


def _check_contractions(a: ScaledTensor, b: ScaledTensor) -> None:
    """Check that both operands have one K."""
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(
            f"contractions differ: a is {tuple(a.data.shape)}, b is {tuple(b.data.shape)}; both are K-major"
        )


def scaled_mm_accumulate(out: Tensor, a: ScaledTensor, b: ScaledTensor) -> None:
    """``out += a @ bᵀ`` with ``out [M, N]`` in float32 (a weight's ``main_grad``).

    Raises:
        TypeError, ValueError: the contractions differ, or ``out`` has another dtype or shape, or is elsewhere.
    """
    _check_contractions(a, b)
    options_text = format_scaled_mm_options(a.layout, b.layout, torch.float32)
    _scaled_mm_accumulate(out, a.data, a.scale_inv, b.data, b.scale_inv, options_text)
