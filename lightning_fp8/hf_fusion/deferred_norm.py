"""RMSNorm and the cast of its output in one pass, for FP8 layers that read the output as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.deferred import DeferredTensor
from lightning_fp8.functions.linear import Product, Slots, refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.scaled import Role


class NormOutput(DeferredTensor):
    """``x rstd weight`` of RMSNorm."""

    what = "the output of a norm that casts for FP8 layers"
    made_of = "the norm's input or weight"

    def _compute(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The output, rounded as in Hugging Face's norms: before it is multiplied by the weight."""
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normalized.to(x.dtype)


class NormCastFunction(torch.autograd.Function):
    """RMSNorm of ``x [..., K]``; ``cast`` receives its FP8 copies.

    Saves x, the weight and float32 statistics for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cast: InputCast,
        slots: Slots,
        observe: bool,
        columnwise: bool,
    ) -> Tensor:
        operands, statistics = ops.norm_quantize(
            x.view(-1, x.shape[-1]),
            weight,
            None,
            cast.recipe.cast(Role.INPUT),
            eps=eps,
            rms=True,
            **Product(cast.recipe, slots, observe).cast_args(Role.INPUT, rowwise=True, columnwise=columnwise),
        )
        cast.complete(operands)
        ctx.save_for_backward(x, weight, statistics)
        return NormOutput(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a norm that casts for FP8 layers", "fuse=False")
        x, weight, statistics = ctx.saved_tensors
        columns = x.shape[-1]
        dx, dweight, _ = ops.norm_backward(dy.reshape(-1, columns), x.view(-1, columns), weight, statistics, rms=True)
        return dx.view(x.shape), dweight, *[None] * 5
