"""The gradients of an FP8 linear layer, and what it keeps for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.history import Slot
from lightning_fp8.ops import Quantized
from lightning_fp8.recipes import DelayedScaling, Recipe
from lightning_fp8.scaled import Role, ScaledTensor

Slots = dict[Role, Slot]


def quantize_role(
    x: Tensor,
    role: Role,
    recipe: Recipe,
    slots: Slots,
    *,
    observe: bool,
    rowwise: bool = True,
    columnwise: bool = False,
) -> Quantized:
    """Cast ``x [R, K]`` as ``recipe`` does for ``role``; delayed scaling reads and, if ``observe``, feeds its slot.

    A weight that is a transposed view is cast as it lies in memory, and its two copies change places.
    """
    if role is Role.WEIGHT and not x.is_contiguous() and x.t().is_contiguous():
        lying = quantize_role(x.t(), role, recipe, slots, observe=observe, rowwise=columnwise, columnwise=rowwise)
        return Quantized(lying.columnwise, lying.rowwise)
    slot = slots[role] if isinstance(recipe, DelayedScaling) else None
    return ops.quantize(
        x,
        recipe.cast(role),
        scale=slot.scale if slot else None,
        seen=slot.seen if slot and observe else None,
        may_be_0=slot is None or slot.may_be_0,
        rowwise=rowwise,
        columnwise=columnwise,
    )


class LinearFunction(torch.autograd.Function):
    """``y = x wᵀ + bias`` with its three GEMMs in FP8.

    Keeps the FP8 copy of x that wgrad multiplies and the weight parameter, which dgrad casts again: a kept FP8 weight
    would hold every gathered layer in memory under FSDP2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        slots: Slots,
        observe: bool,
        out_dtype: torch.dtype,
        cached_weight: Quantized | None,
        main_grad: Tensor | None,
    ) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        x8 = quantize_role(x, Role.INPUT, recipe, slots, observe=observe, columnwise=needs_wgrad)
        w8 = cached_weight or quantize_role(weight, Role.WEIGHT, recipe, slots, observe=observe)
        y = ops.scaled_mm(_present(x8.rowwise), _present(w8.rowwise), bias=bias, out_dtype=out_dtype, fast_accum=True)

        saved = (x8.columnwise.data, x8.columnwise.scale_inv) if x8.columnwise else (None, None)
        ctx.save_for_backward(*saved, weight if needs_dgrad else None)
        ctx.recipe, ctx.slots, ctx.cached_weight, ctx.main_grad = recipe, slots, cached_weight, main_grad
        ctx.x_layout = x8.columnwise.layout if x8.columnwise else None
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        x_data, x_scale_inv, weight = ctx.saved_tensors
        dx = dw = dbias = None
        if needs_dgrad or needs_wgrad:
            dy8 = quantize_role(
                dy, Role.GRAD_OUTPUT, ctx.recipe, ctx.slots, observe=True, rowwise=needs_dgrad, columnwise=needs_wgrad
            )
        if needs_dgrad:
            w8 = ctx.cached_weight or quantize_role(
                weight, Role.WEIGHT, ctx.recipe, ctx.slots, observe=False, rowwise=False, columnwise=True
            )
            dx = ops.scaled_mm(_present(dy8.rowwise), _present(w8.columnwise), out_dtype=ctx.x_dtype)
        if needs_wgrad:
            x_t = ScaledTensor(x_data, x_scale_inv, ctx.x_layout)
            if ctx.main_grad is not None:
                ops.scaled_mm_accumulate(ctx.main_grad, _present(dy8.columnwise), x_t)
            else:
                dw = ops.scaled_mm(_present(dy8.columnwise), x_t, out_dtype=ctx.weight_dtype)
        if needs_bias_grad:
            dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, dbias, *[None] * 6


def _present(operand: ScaledTensor | None) -> ScaledTensor:
    assert operand is not None  # it was asked for
    return operand


class ObserveGradFunction(torch.autograd.Function):
    """Identity that collects the amax of the gradient that passes it; calibration uses it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ops.observe(dy, ctx.slot.seen)
        return dy, None
