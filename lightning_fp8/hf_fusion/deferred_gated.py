"""``activation(x) * factor`` and its cast in one pass, for the FP8 layer that reads it, with gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.deferred import DeferredGradient, DeferredTensor
from lightning_fp8.functions.linear import Product, Slots, refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.cast import CastArgs
from lightning_fp8.scaled import Cast, Role

_aten = torch.ops.aten


class _InTorch(NamedTuple):
    """torch's implementation of an activation: ``forward(x)``, and its gradient ``backward(dy, x)``."""

    forward: Any
    backward: Any


_IN_TORCH = {
    "silu": _InTorch(F.silu, _aten.silu_backward),
    "gelu": _InTorch(partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
}
"""By the names of :func:`lightning_fp8.ops.gated_quantize`; ``gelu`` is the tanh form."""

_MADE_OF = "what the activation or its factor was computed from"


class GatedOutput(DeferredTensor):
    """``activation(x) * factor``."""

    what = "an activation that is cast for the FP8 layer behind it"
    made_of = _MADE_OF

    def _compute(self, x: Tensor, factor: Tensor, activation: str) -> Tensor:
        """The product; both factors are rounded to x's dtype."""
        return _IN_TORCH[activation].forward(x) * factor  # type: ignore[no-any-return]


class ActivatedGradient(DeferredGradient):
    """The gradient of x through ``activation(x) * factor``."""

    what = "the gradient of an activation, which is cast for the FP8 layer before it,"
    made_of = _MADE_OF

    def _compute(self, dy: Tensor, x: Tensor, factor: Tensor, activation: str) -> Tensor:
        return _IN_TORCH[activation].backward(dy * factor, x)  # type: ignore[no-any-return]

    def quantized(self, cast: Cast, args: CastArgs) -> Quantized:
        dy, x, factor, activation = self.checked_source()
        return ops.gated_backward_quantize(dy, x, factor, activation, cast, **args)


class FactorGradient(DeferredGradient):
    """The gradient of the factor: ``activation(x) * dy``."""

    what = "the gradient of an activation's factor, which is cast for the FP8 layer before it,"
    made_of = _MADE_OF

    def _compute(self, dy: Tensor, x: Tensor, activation: str) -> Tensor:
        return dy * _IN_TORCH[activation].forward(x)  # type: ignore[no-any-return]

    def quantized(self, cast: Cast, args: CastArgs) -> Quantized:
        dy, x, activation = self.checked_source()
        return ops.gated_quantize(x, dy, activation, cast, **args)


class GatedCastFunction(torch.autograd.Function):
    """``activation(x) * factor`` of two tensors ``[..., K]``; ``cast`` receives its FP8 copies.

    Saves x and the factor. The gradients are cast by the layers that they reach.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factor: Tensor,
        activation: str,
        cast: InputCast,
        slots: Slots,
        observe: bool,
        columnwise: bool,
    ) -> Tensor:
        columns = x.shape[-1]
        args = Product(cast.recipe, slots, observe).cast_args(Role.INPUT, rowwise=True, columnwise=columnwise)
        of_input = cast.recipe.cast(Role.INPUT)
        cast.complete(ops.gated_quantize(x.view(-1, columns), factor.view(-1, columns), activation, of_input, **args))
        ctx.save_for_backward(x, factor)
        ctx.activation = activation
        return GatedOutput(x, factor, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("an MLP that casts its activation", "fuse=False")
        x, factor = ctx.saved_tensors
        needs_x, needs_factor, *_ = ctx.needs_input_grad
        dx = ActivatedGradient(dy, x, factor, ctx.activation) if needs_x else None
        dfactor = FactorGradient(dy, x, ctx.activation) if needs_factor else None
        return dx, dfactor, *[None] * 5
