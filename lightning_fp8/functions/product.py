"""Product: one linear layer inside a function that fuses more than that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.linear import Slots, cast_args, present, quantize_role, weight_gradient
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.quantize.casting import CastArgs
from lightning_fp8.recipes import Recipe
from lightning_fp8.scaled import Cast, Role, ScaledTensor


class Product(NamedTuple):
    """How one linear layer, ``y [R, N] = x [R, K] wᵀ + bias``, runs its three GEMMs.

    Attributes:
        recipe: how its tensors are cast.
        slots: its slots of the amax history.
        observe: whether casts of the forward and the backward pass feed them.
        cached_weight: the FP8 copies of the weight, where micro-batches share them.
        main_grad: what the weight's gradient is added to.
    """

    recipe: Recipe
    slots: Slots
    observe: bool
    cached_weight: Quantized | None = None
    main_grad: Tensor | None = None

    def cast(self, role: Role) -> Cast:
        """Format and scales of the tensor of ``role``."""
        return self.recipe.cast(role)

    def cast_args(self, role: Role, *, rowwise: bool, columnwise: bool, again: bool = False) -> CastArgs:
        """The keywords of an op that casts ``role``; ``again``: a recomputed tensor, which feeds no amax."""
        observe = self.observe and not again
        return cast_args(role, self.recipe, self.slots, observe=observe, rowwise=rowwise, columnwise=columnwise)

    def forward(
        self, x8: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, again: bool = False
    ) -> Tensor:
        """``x wᵀ + bias`` in ``dtype``."""
        w8 = self.cached_weight or quantize_role(
            weight, Role.WEIGHT, self.recipe, self.slots, observe=self.observe and not again
        )
        return ops.scaled_mm(present(x8.rowwise), present(w8.rowwise), bias=bias, out_dtype=dtype, fast_accum=True)

    def quantized_gradient(self, dy: Tensor, *, rowwise: bool, columnwise: bool) -> Quantized:
        """The operands of ``dy [R, N]``."""
        usage = {"rowwise": rowwise, "columnwise": columnwise}
        return quantize_role(dy, Role.GRAD_OUTPUT, self.recipe, self.slots, observe=self.observe, **usage)

    def input_gradient(self, dy8: Quantized, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``dy w`` in ``dtype``."""
        w8 = self.cached_weight or quantize_role(
            weight, Role.WEIGHT, self.recipe, self.slots, observe=False, rowwise=False, columnwise=True
        )
        return ops.scaled_mm(present(dy8.rowwise), present(w8.columnwise), out_dtype=dtype)

    def weight_gradient(self, dy8: Quantized, x_t: ScaledTensor, weight: Tensor) -> Tensor | None:
        """``dyᵀ x`` in weight's dtype; None where it was added to :attr:`main_grad`."""
        return weight_gradient(dy8, x_t, self.main_grad, weight.dtype)

    def saved(self, x8: Quantized | None) -> tuple[Tensor | None, Tensor | None]:
        """The tensors of x's operand that wgrad multiplies, to be saved; see :meth:`unsaved`."""
        x_t = None if x8 is None else x8.columnwise
        return (None, None) if x_t is None else (x_t.data, x_t.scale_inv)

    def unsaved(self, data: Tensor, scale_inv: Tensor) -> ScaledTensor:
        """The operand whose tensors :meth:`saved` gave."""
        return ScaledTensor(data, scale_inv, self.cast(Role.INPUT).layout)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """``dy [R, N]`` summed over rows, in ``dtype``."""
    return dy.sum(0, dtype=torch.float32).to(dtype)


def refuse_second_derivatives(layer_name: str, instead: str) -> None:
    """Raises:
    RuntimeError: a backward pass is to be differentiated, with ``create_graph=True``.
    """
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True cannot derive {layer_name}'s gradients in FP8, which are cast as they are computed; "
            f"use {instead}, which has second derivatives, or run this part in high precision: with "
            "fp8_autocast(enabled=False)"
        )
