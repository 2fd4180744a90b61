"""The autograd function of a norm and an FP8 linear layer that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.functions.product import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import Normalized


def quantized_norm(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    norm: Norm,
    product: Product,
    *,
    columnwise: bool,
    again: bool = False,
) -> Normalized:
    """The norm of ``x [R, K]``, cast as the input of ``product``. ``columnwise`` also casts it for wgrad."""
    normalized = ops.norm_quantize(
        x,
        norm_weight,
        norm_bias,
        product.cast(Role.INPUT),
        eps=norm.eps,
        rms=norm.rms,
        zero_centered=norm.zero_centered,
        **product.cast_args(Role.INPUT, rowwise=True, columnwise=columnwise, again=again),
    )
    if product.is_sampled(Role.INPUT) and not again:
        values = normalize(x, norm_weight, norm_bias, norm, x.shape[1:], torch.float32)
        product.sample(Role.INPUT, values, normalized.operands)
    return normalized


def norm_gradients(
    dy: Tensor | None,
    of_output: Tensor | None,
    x: Tensor,
    norm_weight: Tensor,
    statistics: Tensor,
    norm: Norm,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x ``[R, K]``, weight and bias, given those of the FP8 copy and of the returned norm output."""
    if dy is None or of_output is None:
        dy = of_output if dy is None else dy
        assert dy is not None
    else:
        dy = dy + of_output
    return ops.norm_backward(
        dy, x, norm_weight, statistics, rms=norm.rms, zero_centered=norm.zero_centered, bias_gradient=bias_gradient
    )


class LayerNormLinearFunction(torch.autograd.Function):
    """``y [R, N] = norm(x [R, K]) wᵀ + bias`` with its three GEMMs in FP8. Optionally it also returns ``norm(x)``.

    It saves x, the norm's statistics, the FP8 copy that wgrad multiplies, and the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        product: Product,
        dtype: torch.dtype,
        gives_norm: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        needs_wgrad = ctx.needs_input_grad[3]
        needs_norm = any(ctx.needs_input_grad[:3])
        x8, statistics = quantized_norm(x, norm_weight, norm_bias, norm, product, columnwise=needs_wgrad)
        y, _ = product.forward(x8, weight, bias, dtype)
        kept = (x, statistics, norm_weight) if needs_norm else (None, None, None)
        ctx.save_for_backward(*kept, weight, *product.saved(x8))
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.norm = norm
        ctx.product = product
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        if not gives_norm:
            return y
        return y, normalize(x, norm_weight, norm_bias, norm, x.shape[1:], dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, of_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("LayerNormLinear")
        x, statistics, norm_weight, weight, *x8 = ctx.saved_tensors
        needs_wgrad, needs_bias_grad = ctx.needs_input_grad[3:5]
        product: Product = ctx.product
        normed = dw = dbias = None
        if dy is not None:
            if x is not None or needs_wgrad:
                x_t = product.unsaved(*x8) if needs_wgrad else None
                normed, dw = product.gradients(dy, None if x is None else weight, x_t, ctx.dtype, weight.dtype)
            if needs_bias_grad:
                dbias = bias_gradient(dy, ctx.bias_dtype)
        of_norm_and_x: tuple[Tensor | None, ...] = (None, None, None)
        if x is not None:
            has_bias = ctx.needs_input_grad[2]
            of_norm_and_x = norm_gradients(normed, of_norm, x, norm_weight, statistics, ctx.norm, has_bias)
        return *of_norm_and_x, dw, dbias, None, None, None, None
