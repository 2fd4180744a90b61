"""RMSNorm in high precision, in one kernel forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.product import refuse_second_derivatives


class RMSNormFunction(torch.autograd.Function):
    """:func:`lightning_fp8.ops.rms_norm` of ``x [..., K]``. It saves x, the weight and one float32 for each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, eps: float, zero_centered: bool, rounds_first: bool
    ) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y, statistics = ops.rms_norm(
            rows, weight, dtype, eps=eps, zero_centered=zero_centered, rounds_first=rounds_first
        )
        ctx.save_for_backward(x, weight, statistics)
        ctx.zero_centered = zero_centered
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a fused norm")
        try:
            x, weight, statistics = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            said = "the input or weight of a fused norm was changed in place before its backward (h = norm(r); r += h)"
            raise RuntimeError(f"{said}: write r = r + h, or convert the model with fuse=False") from error
        columns = x.shape[-1]
        dx, dweight, _ = ops.norm_backward(
            dy.reshape(-1, columns),
            x.reshape(-1, columns),
            weight,
            statistics,
            rms=True,
            zero_centered=ctx.zero_centered,
        )
        return dx if x.dim() == 2 else dx.view(x.shape), dweight, None, None, None, None
