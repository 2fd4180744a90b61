"""Product: the casts and the three FP8 GEMMs of a linear layer, in its forward and its backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.delayed.history import Slot, span_of
from lightning_fp8.functions.main_grad import Delayed, MainGrad, redirect
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Cast, Role, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.cast import CastArgs, asked, operands_of
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.linear import Pass
from lightning_fp8.ops.op import PLAIN_TENSORS
from lightning_fp8.weights.fp8_tensor import FP8Tensor, is_cast_for, kept_operands

Slots = dict[Role, Slot]


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
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._span = span_of(recipe) if isinstance(recipe, DelayedScaling) else None

    def redirected(
        self, cached_weight: Quantized | None, main_grad: MainGrad | None, delayed: Delayed | None
    ) -> Product:
        """The same product with other ``cached_weight``, ``main_grad`` and ``delayed``. Both share their passes."""
        made = Product(self.recipe, self.slots, self.observe, cached_weight, main_grad, delayed)
        made._passes = self._passes
        return made

    # --- Casts --------------------------------------------------------------------------------------------------------

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

        The weight of experts is ``[E, N, K]``. A weight that is a transposed view is cast in its memory order, and the
        two copies are exchanged. An FP8Tensor in the format and blocks of the recipe is used as it is; any other
        FP8Tensor is dequantized and cast.
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
        if role is Role.WEIGHT and not x.is_contiguous() and x.mT.is_contiguous():
            stored = self.quantize(x.mT, role, rowwise=columnwise, columnwise=rowwise, again=again)
            return Quantized(stored.columnwise, stored.rowwise)
        args = self.cast_args(role, rowwise=rowwise, columnwise=columnwise, again=again)
        quantize = ops.quantize_experts if x.dim() == 3 else ops.quantize
        made = quantize(x, self._casts[role], **args)
        if not again:
            self.sample(role, x, made)
        return made

    def is_sampled(self, role: Role) -> bool:
        """Whether a monitor samples the casts of ``role``."""
        return self.observe and self.slots[role].sample is not None

    def sample(self, role: Role, x: Tensor, made: Quantized) -> None:
        """If a monitor asks, count the errors of a cast of ``x [R, K]``, or of eight experts of ``x [E, N, K]``."""
        sample = self.slots[role].sample
        operand = made.rowwise or made.columnwise
        if sample is None or operand is None or not self.observe:
            return
        x = x.detach()
        matrices = [(x, operand)]
        if x.dim() == 3:
            matrices = [(x[each], operand.of_expert(each)) for each in range(0, len(x), -(-len(x) // 8))]
        for values, part in matrices:
            ops.sample_cast(values, part, sample.counts, transposed=made.rowwise is None)
            if sample.losses is not None and sample.exponents is not None:
                ops.sample_recipes(values, role, sample.losses, sample.exponents)

    # --- Passes -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor | Quantized,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        shared: InputCast | None = None,
        *,
        columnwise: bool = False,
        again: bool = False,
    ) -> tuple[Tensor, Quantized]:
        """``x wᵀ + bias [R, N]`` in ``dtype``, and the operands of x.

        Args:
            x: ``[..., K]``, or its operands.
            weight: ``[N, K]``.
            bias: ``[N]``, or None.
            shared: the cast of x that other layers may read, too.
            columnwise: whether the operand of xᵀ is needed.
            again: whether this repeats a forward, which has observed the weight's amax.
        """
        rows = x if isinstance(x, Quantized) or x.dim() == 2 else x.reshape(-1, x.shape[-1])
        repeats = shared is not None and shared.reads > 1  # the slot already has the amax of the first reader
        exist = isinstance(rows, FP8Tensor) or (shared is not None and shared.rowwise is not None)
        a = self._existing_operands(rows, shared, columnwise, repeats) if exist else rows  # type: ignore[arg-type]
        y, _, x8 = self._run(
            Role.INPUT, a, weight, None, dtype, None, bias, columnwise=columnwise, again=repeats, w_again=again
        )
        if shared is not None and not exist:
            x8 = shared.complete(x8, columnwise)
        if self.slots[Role.INPUT].sample is not None and not isinstance(rows, (Quantized, FP8Tensor)):
            self.sample(Role.INPUT, rows, x8)  # type: ignore[arg-type]
        return y, x8  # type: ignore[return-value]

    def gradients(
        self,
        dy: Tensor | Quantized,
        weight: Tensor | None,
        x_t: ScaledTensor | None,
        dx_dtype: torch.dtype,
        dw_dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        """``dx = dy w [R, K]`` and ``dw = dyᵀ x [N, K]``, given ``dy [R, N]`` or its operands.

        Without ``weight`` there is no dx, and without ``x_t``, the operand of xᵀ, no dw. With :attr:`main_grad` or
        :attr:`delayed`, dw is the value that the backward pass returns in its place.
        """
        redirected = self.main_grad is not None or self.delayed is not None
        dx, dw, dy8 = self._run(
            Role.GRAD_OUTPUT, dy, weight, None if redirected else x_t, dx_dtype, dw_dtype,
            columnwise=x_t is not None, w_again=True,
        )  # fmt: skip
        if self.slots[Role.GRAD_OUTPUT].sample is not None and isinstance(dy, Tensor):
            self.sample(Role.GRAD_OUTPUT, dy, dy8)  # type: ignore[arg-type]
        if redirected and x_t is not None:
            dw = redirect(partial(self._weight_gradient, dy8.columnwise, x_t, dw_dtype), self.main_grad, self.delayed)  # type: ignore[union-attr, arg-type]
        return dx, dw

    def _run(
        self,
        role: Role,
        a: Tensor | Quantized,
        weight: Tensor | None,
        x_t: ScaledTensor | None,
        first_dtype: torch.dtype,
        second_dtype: torch.dtype | None,
        bias: Tensor | None = None,
        *,
        columnwise: bool,
        again: bool = False,
        w_again: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Quantized | None]:
        """Run a :class:`~lightning_fp8.ops.linear.Pass`: its two results, and the operands of ``a`` if they are read.

        Args:
            role: that of ``a``, which tells a forward from a backward.
            weight: None leaves the first GEMM out.
            x_t: the operand of xᵀ; None leaves the second GEMM out.
            columnwise: whether to cast aᵀ, too.
            again, w_again: whether the amaxes of ``a`` and of the weight have been observed before.
        """
        is_forward = role is Role.INPUT
        a8 = w8 = None
        a_is_nonzero = w_is_nonzero = False
        of_a: Any
        of_w: Any = None, None, None
        if isinstance(a, Quantized):
            a8, of_a = a, (*_parts(a.rowwise), None, *_parts(a.columnwise))
        else:
            *scale_and_amax, a_is_nonzero = self._scale_and_amax(role, again)
            of_a = a, *scale_and_amax, None, None
        if weight is None:
            pass
        elif self.cached_weight is not None or isinstance(weight, FP8Tensor) or not weight.is_contiguous():
            w8 = self.cached_weight or self.quantize(
                weight, Role.WEIGHT, rowwise=is_forward, columnwise=not is_forward, again=w_again
            )
            of_w = *_parts(w8.rowwise if is_forward else w8.columnwise), None
        else:
            *scale_and_amax, w_is_nonzero = self._scale_and_amax(Role.WEIGHT, w_again)
            of_w = weight, *scale_and_amax
        key = (
            role, first_dtype, second_dtype, a8 is None, a_is_nonzero, columnwise, weight is None, w8 is None,
            w_is_nonzero, x_t is None, (weight.is_cuda if weight is not None else isinstance(a, Tensor) and a.is_cuda),
        )  # fmt: skip
        kept = self._passes.get(key)
        if kept is None:
            a_cast, w_cast, x_cast = self._casts[role], self._casts[Role.WEIGHT], self._casts[Role.INPUT]
            kept = Pass(
                asked(a, a_cast, weight is not None, columnwise, a_is_nonzero) if isinstance(a, Tensor) else None,
                None if w8 or weight is None else asked(weight, w_cast, is_forward, not is_forward, w_is_nonzero),
                is_forward,
                None if weight is None else Gemm(a_cast.layout, w_cast.layout, first_dtype, fast_accum=is_forward),
                None if x_t is None else Gemm(a_cast.layout, x_cast.layout, second_dtype),  # type: ignore[arg-type]
            )
            if not torch.compiler.is_compiling():  # an autograd function that is traced must not change the product
                self._passes[key] = kept
        of_x_t = (None, None) if x_t is None else (x_t.data, x_t.scale_inv)
        first, second, of_a, of_w = kept.run(*of_a, *of_w, bias, *of_x_t)  # type: ignore[call-arg]
        if kept.w_cast is not None and self.slots[Role.WEIGHT].sample is not None and not w_again:
            operand = ScaledTensor(of_w[0], of_w[1], self._casts[Role.WEIGHT].layout)
            self.sample(Role.WEIGHT, weight, Quantized(operand, None))  # type: ignore[arg-type]
        is_read = is_forward or (columnwise and x_t is None) or self.slots[role].sample is not None
        if kept.a_cast is not None and is_read:
            a8 = operands_of(of_a, kept.a_cast, weight is not None, columnwise)
        return first, second, a8

    def _weight_gradient(self, dy_t: ScaledTensor, x_t: ScaledTensor, dtype: torch.dtype) -> Tensor | None:
        if self.main_grad is None:
            return ops.scaled_mm(dy_t, x_t, out_dtype=dtype)
        return self.main_grad.add_product(dy_t, x_t)

    def _existing_operands(self, x: Tensor, shared: InputCast | None, columnwise: bool, again: bool) -> Quantized:
        """The operands of an FP8Tensor ``[R, K]``, or of an input that another layer has cast along its rows."""
        made = None
        if shared is None or shared.rowwise is None:
            made = self.quantize(x, Role.INPUT, columnwise=columnwise, again=again)
        elif columnwise and shared.columnwise is None:
            made = self.quantize(x, Role.INPUT, rowwise=False, columnwise=True, again=again)
        return made if shared is None else shared.complete(made, columnwise)  # type: ignore[return-value]

    # --- Operands that wgrad needs ------------------------------------------------------------------------------------

    def saved(self, x8: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
        """The tensors of x's operand for wgrad, for ``save_for_backward``; see :meth:`unsaved`."""
        x_t = None if x8 is None else x8.columnwise
        return (None, None) if x_t is None else (x_t.data, x_t.scale_inv)

    def unsaved(self, data: Tensor, scale_inv: Tensor) -> ScaledTensor:
        """The operand, given the tensors of :meth:`saved`."""
        return ScaledTensor(data, scale_inv, self._casts[Role.INPUT].layout)


def _parts(operand: ScaledTensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.data, operand.scale_inv)


def without_gradient(x: Tensor) -> Tensor:
    """``x.detach()``. FP8 weights cannot be detached in ``torch.inference_mode``, so it is disabled for them."""
    traced = torch.compiler.is_compiling()  # Dynamo cannot trace the question after it
    if traced or type(x) in PLAIN_TENSORS or not torch.is_inference_mode_enabled():
        return x.detach()
    with torch.inference_mode(False):
        return x.detach()


def refuse_second_derivatives(layer_name: str) -> None:
    """Raises:
    RuntimeError: If the backward pass runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"create_graph=True cannot derive {layer_name}'s gradients in FP8, which are cast as they are computed; "
            "run this part in high precision: with fp8_autocast(enabled=False), or convert the model with skip for its "
            "layers (of a fused norm: fuse=False)"
        )


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``dy [R, N]`` over its rows, in ``dtype``."""
    return dy.sum(0, dtype=torch.float32).to(dtype)
