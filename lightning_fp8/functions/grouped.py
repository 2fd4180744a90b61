"""The autograd function of the three grouped GEMMs of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.product import Product, refuse_second_derivatives
from lightning_fp8.numerics.scaled import Cast, Role, ScaledTensor

MANY_EXPERTS = 32
"""With more experts in a layer, wgrad is in high precision: a loop of as many GEMMs takes longer than FP8 saves."""


class GroupedFunction(torch.autograd.Function):
    """``y [T, N] = x [T, K] w[g]ᵀ`` with its grouped GEMMs in FP8; wgrad of :data:`MANY_EXPERTS` in high precision.

    For wgrad it saves the codes of x if they have one scale. Otherwise it saves x, which wgrad casts along the rows of
    each group. Rows of no group are zeros in x and in the gradient of y: their casts observe no amax.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, product: Product, dtype: torch.dtype) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        x8 = product.quantize(x, Role.INPUT).rowwise
        w8 = (product.cached_weight or product.quantize(weight, Role.WEIGHT)).rowwise
        assert x8 is not None
        assert w8 is not None
        ctx.wgrad_in_fp8 = len(weight) <= MANY_EXPERTS
        in_codes = ctx.wgrad_in_fp8 and x8.layout.has_one_scale
        of_x = (None, None) if not needs_wgrad else (x8.data, x8.scale_inv) if in_codes else (x, None)
        ctx.save_for_backward(*of_x, weight if needs_dgrad else None, offs)
        ctx.product, ctx.dtypes = product, (x.dtype, weight.dtype)
        ctx.transposed = not weight.is_contiguous()
        return ops.grouped_mm(x8, w8, offs, out_dtype=dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("experts")
        x, x_scale_inv, weight, offs = ctx.saved_tensors
        product: Product = ctx.product
        x_dtype, weight_dtype = ctx.dtypes
        dx = dw = None
        in_codes = x_scale_inv is not None
        dy8: Any = None
        if weight is not None or in_codes:
            dy8 = product.quantize(dy, Role.GRAD_OUTPUT).rowwise
        if weight is not None:
            w8 = product.cached_weight or product.quantize(
                weight, Role.WEIGHT, rowwise=False, columnwise=True, again=True
            )
            assert w8.columnwise is not None
            dx = ops.grouped_mm(dy8, w8.columnwise, offs, out_dtype=x_dtype)
        if x is not None:
            of_x = ScaledTensor(x, x_scale_inv, dy8.layout) if in_codes else x
            a: tuple[Any, Cast] = dy8 if in_codes else dy, product.cast(Role.GRAD_OUTPUT)
            b: tuple[Any, Cast] = of_x, product.cast(Role.INPUT)
            if ctx.transposed:  # so that the gradient has the memory order of its parameter
                a, b = b, a
            if ctx.wgrad_in_fp8:
                dw = ops.grouped_wgrad(a[0], b[0], offs, ops.Casts(a[1], b[1]), out_dtype=weight_dtype)
            else:
                dw = ops.grouped_wgrad_in_high_precision(a[0], b[0], offs, out_dtype=weight_dtype)
            dw = dw.mT if ctx.transposed else dw
        return dx, dw, None, None, None
