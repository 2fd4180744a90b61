"""The three FP8 GEMMs of a linear layer (:class:`Product`), and its autograd function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_fp8 import ops
from lightning_fp8.delayed.history import Slot, span_of
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Cast, Role, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.cast import CastArgs, asked, operands_of
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.linear import KeptPlan, backward_pass, forward_pass, linear_backward, linear_forward
from lightning_fp8.weights.fp8_tensor import FP8Tensor, is_cast_for, kept_operands

Slots = dict[Role, Slot]
Delayed = deque[Callable[[], "Tensor | None"]]
"""Delayed gradients of a weight, oldest first, as functions. One returns None if it adds to ``main_grad`` itself."""

_STALE = "_fp8_stale"
"""The attribute that marks a ``main_grad`` as stale: the next wgrad overwrites it."""


class MainGrad(NamedTuple):
    """Accumulates the gradient of a weight ``[N, K]`` in ``weight.main_grad`` instead of ``weight.grad``.

    It supports the attributes that Megatron sets on a weight. With ``overwrite_main_grad=True`` each gradient
    overwrites ``main_grad``. An existing ``grad_added_to_main_grad`` is set to True after an addition.
    """

    weight: Tensor
    tensor: Tensor

    def add_product(self, a: ScaledTensor, b: ScaledTensor) -> Tensor | None:
        """Add ``a @ bᵀ``, and return the value that the backward pass returns as the weight's gradient."""
        if self.tensor.dtype is not torch.float32:
            return self.add(ops.scaled_mm(a, b, out_dtype=torch.float32))
        self._forget_stale()
        ops.scaled_mm_accumulate(self.tensor, a, b)
        return self.replacement()

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add ``gradient``, rounded once, and return the value that the backward pass returns in its place."""
        self._forget_stale()
        self.tensor.add_(gradient)
        return self.replacement()

    def _forget_stale(self) -> None:
        stale = not torch.compiler.is_compiling() and self.tensor.__dict__.pop(_STALE, False)
        if stale or getattr(self.weight, "overwrite_main_grad", False):
            self.tensor.zero_()

    def replacement(self) -> Tensor | None:
        """Zeros if the weight has ``grad_added_to_main_grad``, since Megatron's hooks only run if there is a gradient.

        With ``zero_out_wgrad`` Megatron adds this gradient to ``main_grad``, and other code may add to it before, so it
        is a new tensor. Otherwise all weights of the same shape share one tensor.
        """
        weight = self.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if torch.compiler.is_compiling() or getattr(weight, "zero_out_wgrad", False):
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return _shared_zeros(weight.shape, weight.dtype, weight.device).detach()


@lru_cache(maxsize=32)
def _shared_zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class Product:
    """The casts and the three GEMMs of one linear layer, ``y [R, N] = x [R, K] wᵀ + bias``.

    Attributes:
        recipe: the recipe of the casts.
        slots: the layer's slots of the amax history.
        observe: whether the casts of the forward and the backward pass write amaxes to the slots.
        cached_weight: the cached FP8 copies of the weight; None casts it.
        main_grad: accumulates the weight's gradient instead of ``grad``; None uses ``grad``.
        delayed: collects the weight's gradients until the layer's ``backward_dw``; None computes them at once.
    """

    __slots__ = ("_casts", "_passes", "_span", "cached_weight", "delayed", "main_grad", "observe", "recipe", "slots")

    def __init__(
        self,
        recipe: Recipe,
        slots: Slots,
        observe: bool,
        cached_weight: Quantized | None = None,
        main_grad: MainGrad | None = None,
        delayed: Delayed | None = None,
    ) -> None:
        self.recipe = recipe
        self.slots = slots
        self.observe = observe
        self.cached_weight = cached_weight
        self.main_grad = main_grad
        self.delayed = delayed
        self._casts = {role: recipe.cast(role) for role in LINEAR_ROLES}
        self._passes: dict[tuple[Any, ...], KeptPlan] = {}
        self._span = span_of(recipe) if isinstance(recipe, DelayedScaling) else None

    def redirected(
        self, cached_weight: Quantized | None, main_grad: MainGrad | None = None, delayed: Delayed | None = None
    ) -> Product:
        """The same product with other ``cached_weight``, ``main_grad`` and ``delayed``. Both share their plans."""
        made = Product(self.recipe, self.slots, self.observe, cached_weight, main_grad, delayed)
        made._passes = self._passes
        return made

    def cast(self, role: Role) -> Cast:
        """The format and scales of the tensor of ``role``."""
        return self._casts[role]

    def cast_args(self, role: Role, *, rowwise: bool, columnwise: bool, again: bool = False) -> CastArgs:
        """The keyword arguments of an op that casts ``role``. ``again`` does not observe the amax a second time."""
        scale, amax, scale_is_nonzero = self._scale_and_amax(role, again)
        return {
            "scale": scale,
            "amax": amax,
            "scale_is_nonzero": scale_is_nonzero,
            "rowwise": rowwise,
            "columnwise": columnwise,
        }

    def _scale_and_amax(self, role: Role, again: bool = False) -> tuple[Tensor | None, Tensor | None, bool]:
        """The scale of ``role``'s slot, the amax to update, and whether the scale is known to be nonzero."""
        if self._span is None:
            return None, None, False
        slot = self.slots[role]
        amax = slot.amax if self.observe and not again else None
        scale = slot.scale if slot.history.span == self._span else slot.scale_for(self._span)  # a frame less
        return scale, amax, slot.scale_is_nonzero()

    def quantize(
        self, x: Tensor, role: Role, *, rowwise: bool = True, columnwise: bool = False, again: bool = False
    ) -> Quantized:
        """Cast ``x [R, K]`` by the recipe for ``role``. Delayed scaling reads the slot's scale and updates its amax.

        A weight that is a transposed view is cast in its memory order, and the two copies are exchanged. An FP8Tensor
        in the format and blocks of the recipe is used as it is; any other FP8Tensor is dequantized and cast.
        """
        if isinstance(x, FP8Tensor):
            serves = x.recipe is None or x.recipe == self.recipe
            if is_cast_for(x, self._casts[role]) and serves:
                _, amax, _ = self._scale_and_amax(role, again)
                if amax is not None and x.observed is not None:
                    torch.maximum(amax, x.observed, out=amax)
                if torch.compiler.is_compiling():
                    return kept_operands(x, rowwise, columnwise)
                if role is Role.INPUT:
                    x.takers.append(self.slots)
                return x.quantized(rowwise=rowwise, columnwise=columnwise)
            x = x.dequantize()
        if role is Role.WEIGHT and not x.is_contiguous() and x.t().is_contiguous():
            stored = self.quantize(x.t(), role, rowwise=columnwise, columnwise=rowwise, again=again)
            return Quantized(stored.columnwise, stored.rowwise)
        cast, args = self._casts[role], self.cast_args(role, rowwise=rowwise, columnwise=columnwise, again=again)
        made = ops.quantize(x, cast, **args)
        if self.is_sampled(role) and not again:
            self.sample(role, x, made)
        return made

    def is_sampled(self, role: Role) -> bool:
        """Whether a monitor samples the casts of ``role``."""
        return self.observe and self.slots[role].sample is not None

    def sample(self, role: Role, x: Tensor, made: Quantized) -> None:
        """Count the quantization errors of a cast of ``x [R, K]``, given the operands that it ``made``."""
        sample = self.slots[role].sample
        operand = made.rowwise or made.columnwise
        if sample is None or operand is None:
            return
        values = x.detach()
        ops.sample_cast(values, operand, sample.counts, transposed=made.rowwise is None)
        if sample.losses is not None and sample.exponents is not None:
            ops.sample_recipes(values, role, sample.losses, sample.exponents)

    def forward_of_input(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        shared: InputCast | None,
        *,
        columnwise: bool,
    ) -> tuple[Quantized, Tensor]:
        """The operands of ``x [..., K]`` (see :meth:`quantize_input`), and ``x wᵀ + bias`` in ``dtype``."""
        held = shared is not None and not any(shared.lacks(columnwise)) and not self.is_sampled(Role.INPUT)
        if held:
            copies = shared.complete(None)  # type: ignore[union-attr]
            x8 = copies if columnwise else Quantized(copies.rowwise, None)
            return x8, self.forward(x8, weight, bias, dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if (shared is None or shared.is_new) and self._in_one_call(Role.INPUT):
            x_scale, x_amax, x_scale_is_nonzero = self._scale_and_amax(Role.INPUT)
            w_scale, w_amax, w_scale_is_nonzero = self._scale_and_amax(Role.WEIGHT)
            key = dtype, x_scale_is_nonzero, w_scale_is_nonzero, columnwise, rows.is_cuda
            kept = self._passes.get(key)
            if kept is None:
                x_cast = asked(rows, self._casts[Role.INPUT], True, columnwise, x_scale_is_nonzero)
                w_cast = self._casts[Role.WEIGHT].usage(True, False, w_scale_is_nonzero)
                gemm = Gemm(x_cast.layout, w_cast.layout, dtype, True)
                kept = self._passes[key] = forward_pass(x_cast, w_cast, gemm)
            results = linear_forward(kept, rows, x_scale, x_amax, weight, w_scale, w_amax, bias)
            if results is not None:
                x8 = operands_of(results[1], kept.cast, True, columnwise)  # type: ignore[arg-type]
                return x8 if shared is None else shared.complete(x8), results[0]
        x8 = self.quantize_input(rows, shared, columnwise=columnwise)
        return x8, self.forward(x8, weight, bias, dtype)

    def _in_one_call(self, role: Role) -> bool:
        """Whether a pass may cast ``role`` and the weight, and multiply, in one call."""
        return self.cached_weight is None and not torch.compiler.is_compiling() and not self.is_sampled(role)

    def quantize_input(self, x: Tensor, shared: InputCast | None, *, columnwise: bool) -> Quantized:
        """Cast ``x [R, K]`` to the copies that a ``shared`` cast does not hold yet."""
        rowwise, transposed = (True, columnwise) if shared is None else shared.lacks(columnwise)
        made = None
        again = shared is not None and shared.reads > 1  # the slot already has the amax of the first reader
        if rowwise or transposed:
            made = self.quantize(x, Role.INPUT, rowwise=rowwise, columnwise=transposed, again=again)
        if shared is None:
            assert made is not None
            return made
        copies = shared.complete(made)
        if self.is_sampled(Role.INPUT) and (made is None or again):
            self.sample(Role.INPUT, x, copies)
        return copies if columnwise else Quantized(copies.rowwise, None)

    def forward(
        self, x8: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, again: bool = False
    ) -> Tensor:
        """``x wᵀ + bias`` in ``dtype``."""
        if self._in_one_call(Role.WEIGHT):
            assert x8.rowwise is not None
            w_scale, w_amax, w_scale_is_nonzero = self._scale_and_amax(Role.WEIGHT, again)
            key = dtype, x8.rowwise.layout, w_scale_is_nonzero
            kept = self._passes.get(key)
            if kept is None:
                w_cast = self._casts[Role.WEIGHT].usage(True, False, w_scale_is_nonzero)
                gemm = Gemm(x8.rowwise.layout, w_cast.layout, dtype, True)
                kept = self._passes[key] = forward_pass(None, w_cast, gemm)
            operand = x8.rowwise.data, x8.rowwise.scale_inv, None
            results = linear_forward(kept, *operand, weight, w_scale, w_amax, bias)
            if results is not None:
                return results[0]
        w8 = self.cached_weight or self.quantize(weight, Role.WEIGHT, again=again)
        return ops.scaled_mm(x8.rowwise, w8.rowwise, bias=bias, out_dtype=dtype, fast_accum=True)  # type: ignore[arg-type]

    def input_gradient(self, dy8: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``dy w`` in ``dtype``."""
        w8 = self.cached_weight or self.quantize(weight, Role.WEIGHT, rowwise=False, columnwise=True, again=True)
        return ops.scaled_mm(dy8.rowwise, w8.columnwise, out_dtype=dtype)  # type: ignore[arg-type]

    def weight_gradient(self, dy8: Quantized, x_t: ScaledTensor, dtype: torch.dtype) -> Tensor | None:
        """``dyᵀ x`` in ``dtype``. With :attr:`main_grad` or :attr:`delayed`, the value to return in its place."""
        dy_t = dy8.columnwise
        assert dy_t is not None
        if self.delayed is not None:
            return self._later(lambda: self._weight_gradient(dy_t, x_t, dtype))
        return self._weight_gradient(dy_t, x_t, dtype)

    def _weight_gradient(self, dy_t: ScaledTensor, x_t: ScaledTensor, dtype: torch.dtype) -> Tensor | None:
        if self.main_grad is None:
            return ops.scaled_mm(dy_t, x_t, out_dtype=dtype)
        return self.main_grad.add_product(dy_t, x_t)

    def high_precision_weight_gradient(self, dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """:meth:`weight_gradient` of ``dy [R, N]`` and ``x [R, K]`` in high precision."""

        def compute() -> Tensor | None:
            dw = dy.t() @ x
            return dw.to(dtype) if self.main_grad is None else self.main_grad.add(dw)

        return compute() if self.delayed is None else self._later(compute)

    def _later(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        assert self.delayed is not None
        self.delayed.append(compute)
        return None if self.main_grad is None else self.main_grad.replacement()

    def gradients(
        self,
        dy: Tensor | Quantized,
        weight: Tensor | None,
        x_t: ScaledTensor | None,
        dx_dtype: torch.dtype,
        dw_dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        """:meth:`input_gradient` and :meth:`weight_gradient` of ``dy [R, N]``, or of its operands.

        Without ``weight`` or ``x_t`` the gradient that needs it is None.
        """
        redirected = self.main_grad is not None or self.delayed is not None
        if weight is not None and x_t is not None and not redirected and self._in_one_call(Role.GRAD_OUTPUT):
            transposed = dy_cast = amax = None
            w_scale, _, w_scale_is_nonzero = self._scale_and_amax(Role.WEIGHT)
            key: tuple[Any, ...] = dx_dtype, dw_dtype, x_t.layout, w_scale_is_nonzero, weight.is_cuda
            if isinstance(dy, Tensor):
                first, (scale, amax, scale_is_nonzero) = dy, self._scale_and_amax(Role.GRAD_OUTPUT)
                key = *key, scale_is_nonzero
            else:
                assert dy.rowwise is not None
                assert dy.columnwise is not None
                first, scale = dy.rowwise.data, dy.rowwise.scale_inv
                transposed = dy.columnwise.data, dy.columnwise.scale_inv
            kept = self._passes.get(key)
            if kept is None:
                cast, w_cast = self._casts[Role.GRAD_OUTPUT], self._casts[Role.WEIGHT]
                if isinstance(dy, Tensor):
                    dy_cast = asked(dy, cast, True, True, scale_is_nonzero)
                gemms = Gemm(cast.layout, w_cast.layout, dx_dtype), Gemm(cast.layout, x_t.layout, dw_dtype)
                w_cast = asked(weight, w_cast, False, True, w_scale_is_nonzero)
                kept = self._passes[key] = backward_pass(dy_cast, w_cast, *gemms)
            results = linear_backward(kept, first, scale, amax, transposed, weight, w_scale, x_t.data, x_t.scale_inv)
            if results is not None:
                return results
        if isinstance(dy, Tensor):
            dy = self.quantize(dy, Role.GRAD_OUTPUT, rowwise=weight is not None, columnwise=x_t is not None)
        dx = None if weight is None else self.input_gradient(dy, weight, dx_dtype)
        return dx, None if x_t is None else self.weight_gradient(dy, x_t, dw_dtype)

    def saved(self, x8: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
        """The tensors of x's operand for wgrad, for ``save_for_backward``; see :meth:`unsaved`."""
        x_t = None if x8 is None else x8.columnwise
        return (None, None) if x_t is None else (x_t.data, x_t.scale_inv)

    def unsaved(self, data: Tensor, scale_inv: Tensor) -> ScaledTensor:
        """The operand, given the tensors of :meth:`saved`."""
        return ScaledTensor(data, scale_inv, self._casts[Role.INPUT].layout)


def without_gradient(x: Tensor) -> Tensor:
    """``x.detach()``. FP8 weights cannot be detached in ``torch.inference_mode``, so it is disabled for them."""
    traced = torch.compiler.is_compiling()  # Dynamo cannot trace the question after it
    if traced or type(x) in (Tensor, torch.nn.Parameter) or not torch.is_inference_mode_enabled():
        return x.detach()
    with torch.inference_mode(False):
        return x.detach()


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
        x8, y = product.forward_of_input(x, weight, bias, dtype, shared, columnwise=needs_wgrad)
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


def refuse_second_derivatives(layer_name: str) -> None:
    """Raises:
    RuntimeError: If the backward pass runs with ``create_graph=True``.
    """
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True cannot derive {layer_name}'s gradients in FP8, which are cast as they are computed; "
            "run this part in high precision: with fp8_autocast(enabled=False), or convert the model with skip for its "
            "layers (of a fused norm: fuse=False)"
        )


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``dy [R, N]`` over its rows, in ``dtype``."""
    return dy.sum(0, dtype=torch.float32).to(dtype)


# --- Gradients that go elsewhere than to grad -------------------------------------------------------------------------


class RedirectedFunction(torch.autograd.Function):
    """Identity on a weight in high precision. Its backward adds the gradient to ``main_grad``, or delays it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: MainGrad | None, delayed: Delayed | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad, ctx.delayed = main_grad, delayed
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, None, None]:
        main_grad: MainGrad | None = ctx.main_grad
        if dw is None:  # the loss does not depend on the weight
            return None, None, None
        if ctx.delayed is None:
            assert main_grad is not None
            return main_grad.add(dw), None, None
        ctx.delayed.append(lambda: dw if main_grad is None else main_grad.add(dw))
        return None if main_grad is None else main_grad.replacement(), None, None


def mark_stale(main_grad: Tensor) -> None:
    """Mark ``main_grad`` so that the next wgrad overwrites it.

    In Transformer Engine each wgrad of a first micro-batch overwrites it, so a shared layer keeps only its last one.
    """
    setattr(main_grad, _STALE, True)


# --- Gradients in high precision --------------------------------------------------------------------------------------


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
        x8, y = product.forward_of_input(x, weight, bias, dtype, shared, columnwise=False)
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
            dw = product.high_precision_weight_gradient(dy, rows, weight_dtype)
        return dx, dw, bias_gradient(dy, bias_dtype) if needs_bias_grad else None, None, None, None


# --- Calibration ------------------------------------------------------------------------------------------------------


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
