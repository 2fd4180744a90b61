"""The gradients of an FP8 linear layer, and what it keeps for them."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_fp8 import ops
from lightning_fp8.delayed.slot import Slot
from lightning_fp8.delayed.spans import span_of
from lightning_fp8.functions.deferred.tensor import DeferredGradient
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.quantize.casting import CastArgs
from lightning_fp8.recipes import DelayedScaling, Recipe
from lightning_fp8.scaled import Role, ScaledTensor

Slots = dict[Role, Slot]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of x, of the weight and of the bias; None where one is not needed."""

_STALE = "_fp8_stale"
"""The attribute of a ``main_grad`` that the next wgrad overwrites."""


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
    args = cast_args(role, recipe, slots, observe=observe, rowwise=rowwise, columnwise=columnwise)
    if isinstance(x, DeferredGradient):
        return x.quantized(recipe.cast(role), args)
    return ops.quantize(x, recipe.cast(role), **args)


def cast_args(role: Role, recipe: Recipe, slots: Slots, *, observe: bool, rowwise: bool, columnwise: bool) -> CastArgs:
    """The keywords of an op that casts ``role``; delayed scaling gives its slot's scale and, if ``observe``, amax."""
    slot = scale = None
    if isinstance(recipe, DelayedScaling):
        slot = slots[role]
        scale = slot.scale_for(span_of(recipe))
    return {
        "scale": scale,
        "amax": slot.amax if slot and observe else None,
        "scale_is_nonzero": slot is not None and slot.scale_is_nonzero(),
        "rowwise": rowwise,
        "columnwise": columnwise,
    }


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _quantize_input(
    x: Tensor, recipe: Recipe, slots: Slots, shared: InputCast | None, *, observe: bool, columnwise: bool
) -> Quantized:
    """Cast the rows of ``x [..., K]``, as far as a ``shared`` cast has not what this layer multiplies."""
    if shared is None:
        x = _rows(x)
        return quantize_role(x, Role.INPUT, recipe, slots, observe=observe, columnwise=columnwise)
    lacks_rowwise, lacks_columnwise = shared.lacks(columnwise)
    made = None
    if lacks_rowwise or lacks_columnwise:
        made = quantize_role(
            _rows(x),
            Role.INPUT,
            recipe,
            slots,
            observe=observe and shared.reads == 1,  # a later reader's slot is fed already
            rowwise=lacks_rowwise,
            columnwise=lacks_columnwise,
        )
    copies = shared.complete(made)
    return copies if columnwise else Quantized(copies.rowwise, None)


class LinearFunction(torch.autograd.Function):
    """``y [R, N] = x [..., K] wᵀ + bias`` with its three GEMMs in FP8; leading dimensions of x become rows.

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
        place_of_x: tuple[Tensor] | None,
        shared: InputCast | None,
    ) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        ctx.x_shape = x.shape
        ctx.place_of_x = place_of_x
        x8 = _quantize_input(x, recipe, slots, shared, observe=observe, columnwise=needs_wgrad)
        w8 = cached_weight or quantize_role(weight, Role.WEIGHT, recipe, slots, observe=observe)
        y = ops.scaled_mm(present(x8.rowwise), present(w8.rowwise), bias=bias, out_dtype=out_dtype, fast_accum=True)

        saved = (x8.columnwise.data, x8.columnwise.scale_inv) if x8.columnwise else (None, None)
        ctx.save_for_backward(*saved, weight if needs_dgrad else None)
        ctx.recipe = recipe
        ctx.slots = slots
        ctx.cached_weight = cached_weight
        ctx.main_grad = main_grad
        ctx.observe = observe
        ctx.x_layout = x8.columnwise.layout if x8.columnwise else None
        ctx.x_dtype = x.dtype
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_data, x_scale_inv, weight = ctx.saved_tensors
        x_t = None if x_data is None else ScaledTensor(x_data, x_scale_inv, ctx.x_layout)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():  # create_graph=True
            dx, dw, dbias = _differentiable_gradients(ctx, dy, x_t, weight)
        else:
            dx, dw, dbias = _linear_gradients(ctx, dy, x_t, weight)
        if dx is not None and len(ctx.x_shape) != 2:
            dx = dx.view(ctx.x_shape)
        return dx, dw, dbias, *[None] * 8


def _linear_gradients(ctx: Any, dy: Tensor, x_t: ScaledTensor | None, weight: Tensor | None) -> Gradients:
    """``dy w``, ``dyᵀ x`` and ``dy`` summed over rows, as far as :class:`LinearFunction`'s ``ctx`` needs them."""
    needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
    dx = dw = dbias = None
    if needs_dgrad or needs_wgrad:
        usage = {"rowwise": needs_dgrad, "columnwise": needs_wgrad}
        dy8 = quantize_role(dy, Role.GRAD_OUTPUT, ctx.recipe, ctx.slots, observe=ctx.observe, **usage)
    if weight is not None:
        w8 = ctx.cached_weight or quantize_role(
            weight, Role.WEIGHT, ctx.recipe, ctx.slots, observe=False, rowwise=False, columnwise=True
        )
        dx = ops.scaled_mm(present(dy8.rowwise), present(w8.columnwise), out_dtype=ctx.x_dtype)
    if x_t is not None:
        dw = weight_gradient(dy8, x_t, ctx.main_grad, ctx.weight_dtype)
    if needs_bias_grad:
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dw, dbias


def weight_gradient(dy8: Quantized, x_t: ScaledTensor, main_grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``dyᵀ x`` in ``dtype``; None where it was added to ``main_grad``."""
    if main_grad is None:
        return ops.scaled_mm(present(dy8.columnwise), x_t, out_dtype=dtype)
    _forget_if_stale(main_grad)
    ops.scaled_mm_accumulate(main_grad, present(dy8.columnwise), x_t)
    return None


class MainGradFunction(torch.autograd.Function):
    """A weight of a product in high precision, whose gradient is added to ``main_grad`` instead."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor | None) -> tuple[None, None]:
        if dw is not None:  # who has no part in the loss leaves it as it is
            _forget_if_stale(ctx.main_grad)
            ctx.main_grad.add_(dw)
        return None, None


def mark_stale(main_grad: Tensor) -> None:
    """Let the next wgrad overwrite ``main_grad``.

    Transformer Engine lets each wgrad of a first micro-batch overwrite it, and keeps the last call's of a shared layer.
    """
    setattr(main_grad, _STALE, True)


def _forget_if_stale(main_grad: Tensor) -> None:
    if not torch.compiler.is_compiling() and main_grad.__dict__.pop(_STALE, False):
        main_grad.zero_()


def place_in_graph(x: Tensor) -> tuple[Tensor] | None:
    """A stand-in for x in double backward, of its shape and without memory; None where x needs no gradient.

    Only x's FP8 copy is saved, which is no node of the graph: second derivatives with respect to x flow through the
    stand-in. It comes in a tuple, since autograd would take a bare tensor for an input of the function.
    """
    # A compiled graph is derived once only.
    return None if torch.compiler.is_compiling() or not x.requires_grad else (_Placeholder.apply(x),)


class _Placeholder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty_strided(x.shape, (0,) * x.dim())

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx


class _PutInPlace(torch.autograd.Function):
    """``x`` in the graph where ``place`` is."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


class _DifferentiableGradients(torch.autograd.Function):
    """The gradients of :func:`_linear_gradients`, computed by it, with derivatives of their own.

    They take casts for identities, as the first ones do, and multiply ``x [R, K]``, ``dy`` and the weight as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, x: Tensor | None, weight: Tensor | None, linear: Any, x_t: ScaledTensor | None
    ) -> Gradients:
        ctx.save_for_backward(dy, x, weight)
        ctx.set_materialize_grads(False)
        return _linear_gradients(linear, dy, x_t, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dy, x, weight) = ctx.saved_tensors
        (of_dx, of_dw, of_dbias) = gradients
        for_dy = [] if of_dbias is None else [of_dbias.expand_as(dy)]
        for_x = for_weight = None
        if of_dx is not None:
            for_dy.append(_product(of_dx, weight.t()))
            for_weight = _product(dy.t(), of_dx).to(weight.dtype)
        if of_dw is not None:
            for_dy.append(_product(x, of_dw.t()))
            for_x = _product(dy, of_dw).to(x.dtype)
        return reduce(torch.add, for_dy).to(dy.dtype) if for_dy else None, for_x, for_weight, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype)


def _differentiable_gradients(ctx: Any, dy: Tensor, x_t: ScaledTensor | None, weight: Tensor | None) -> Gradients:
    if ctx.main_grad is not None:
        raise RuntimeError(
            "create_graph=True cannot derive what fuse_wgrad_accumulation=True adds to weight.main_grad; construct "
            "the Linear with fuse_wgrad_accumulation=False to take second derivatives"
        )
    x = None if x_t is None else x_t.dequantize(ctx.x_dtype).t()
    if x is not None and ctx.place_of_x is not None:
        x = _PutInPlace.apply(ctx.place_of_x[0].reshape(x.shape), x)
    return _DifferentiableGradients.apply(dy, x, weight, ctx, x_t)


def present(operand: ScaledTensor | None) -> ScaledTensor:
    """An operand that was asked for."""
    assert operand is not None
    return operand


class ObserveGradFunction(torch.autograd.Function):
    """Identity that collects the amax of the gradient that passes it; calibration uses it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ops.observe(dy.detach(), ctx.slot.amax)
        return dy, None
