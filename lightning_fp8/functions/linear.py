"""The autograd functions of a linear layer: with its gradients in FP8, or in high precision; and of calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.delayed.history import Slot
from lightning_fp8.functions.main_grad import redirect
from lightning_fp8.functions.product import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.numerics.scaled import Role, ScaledTensor


class LinearFunction(torch.autograd.Function):
    """``y [R, N] = x [..., K] wᵀ + bias`` with its three GEMMs in FP8. Leading dimensions of x are flattened to rows.

    It saves the FP8 copy of x that wgrad multiplies, and the weight parameter, which dgrad casts again. A saved FP8
    weight would keep every gathered layer in memory under FSDP2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        dtype: torch.dtype,
        shared: InputCast | None,
    ) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        y, x8 = product.forward(x, weight, bias, dtype, shared, columnwise=needs_wgrad)
        ctx.save_for_backward(*product.saved(x8), weight if needs_dgrad else None)
        ctx.product = product
        ctx.x_shape = x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a Linear")
        *x8, weight = ctx.saved_tensors
        _, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        product: Product = ctx.product
        dx = dw = dbias = None
        if weight is not None or needs_wgrad:
            x_t = product.unsaved(*x8) if needs_wgrad else None
            dx, dw = product.gradients(dy, weight, x_t, x_dtype, weight_dtype)
        if needs_bias_grad:
            dbias = bias_gradient(dy, bias_dtype)
        if dx is not None and len(ctx.x_shape) != 2:
            dx = dx.view(ctx.x_shape)
        return dx, dw, dbias, None, None, None


class HighPrecisionGradientsFunction(torch.autograd.Function):
    """``y [R, N] = x [..., K] wᵀ + bias`` in FP8, with gradients in high precision.

    The gradients multiply x and the weight, or, with ``backward_override="dequantized"``, the dequantized operands of
    the forward. The gradient of y is not cast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        dtype: torch.dtype,
        shared: InputCast | None,
    ) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        y, x8 = product.forward(x, weight, bias, dtype, shared)
        ctx.dequantized = product.recipe.backward_override == "dequantized"
        kept: tuple[Tensor | None, ...] = (x, None)
        if ctx.dequantized:
            assert x8.rowwise is not None
            kept = x8.rowwise.data, x8.rowwise.scale_inv
        ctx.save_for_backward(*(kept if needs_wgrad else (None, None)), weight if needs_dgrad else None)
        ctx.product, ctx.x_shape, ctx.dtype = product, x.shape, dtype
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a Linear")
        x, scale_inv, weight = ctx.saved_tensors
        product: Product = ctx.product
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dtype: torch.dtype = ctx.dtype
        dx = dw = None
        if needs_dgrad:
            if ctx.dequantized:
                w8 = product.cached_weight or product.quantize(weight, Role.WEIGHT, again=True)
                assert w8.rowwise is not None
                weight = w8.rowwise.dequantize(dtype)
            dx = (dy @ weight.to(dtype)).to(x_dtype).view(ctx.x_shape)
        if needs_wgrad:
            if ctx.dequantized:
                x = ScaledTensor(x, scale_inv, product.cast(Role.INPUT).layout).dequantize(dtype)
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            main_grad = product.main_grad

            def weight_gradient() -> Tensor | None:
                gradient = dy.t() @ rows
                return gradient.to(weight_dtype) if main_grad is None else main_grad.add(gradient)

            dw = redirect(weight_gradient, main_grad, product.delayed)
        return dx, dw, bias_gradient(dy, bias_dtype) if needs_bias_grad else None, None, None, None


class ObserveGradFunction(torch.autograd.Function):
    """Identity whose backward observes the amax of the gradient, for calibration."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ops.observe(dy.detach(), ctx.slot.amax)
        return dy, None
