"""The autograd function of a gated MLP: FP8 linear layers of one input, their activated product, and another one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.product import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.activation import activated, activated_backward, gated, gated_backward


class GatedMLP(NamedTuple):
    """The settings of a :class:`GatedMLPFunction`.

    Attributes:
        activation: a name of :data:`lightning_fp8.ops.ACTIVATIONS`; gated if gate and up are one layer.
        gate, up, down: the linear layers. up is None if gate computes both, as the halves ``[gate, up]`` of its output.
        dtype: the dtype of their outputs, and of the gradients between them.
        shared: the cast of the input, which other layers may read, too; None if it cannot be shared.
    """

    activation: str
    gate: Product
    up: Product | None
    down: Product
    dtype: torch.dtype
    shared: InputCast | None

    def activated(self, g: Tensor, u: Tensor | None, *, columnwise: bool) -> Quantized:
        """The input of the last layer, cast. ``u``: None if ``g`` has both halves."""
        down = self.down
        args = down.cast_args(Role.INPUT, rowwise=True, columnwise=columnwise)
        if u is None:
            made = ops.activation_quantize(g, self.activation, down.cast(Role.INPUT), **args)
        else:
            made = ops.gated_quantize(g, u, self.activation, down.cast(Role.INPUT), **args)
        if down.is_sampled(Role.INPUT):
            values = activated(g, self.activation) if u is None else gated(g, u, self.activation)
            down.sample(Role.INPUT, values, made)
        return made

    def gradients(
        self, da: Tensor, g: Tensor, u: Tensor | None, *, rowwise: bool, of_gate: bool, of_up: bool
    ) -> tuple[Quantized, Quantized | None]:
        """The casts of the gradients of g and u. ``of_gate``, ``of_up``: also for the weights' gradients."""
        for_gate = self.gate.cast_args(Role.GRAD_OUTPUT, rowwise=rowwise or not of_gate, columnwise=of_gate)
        cast = self.gate.cast(Role.GRAD_OUTPUT)
        if u is None or self.up is None:
            dg8, _ = ops.activation_backward_quantize(da, g, self.activation, cast, **for_gate)
            if self.gate.is_sampled(Role.GRAD_OUTPUT):
                self.gate.sample(Role.GRAD_OUTPUT, activated_backward(da, g, self.activation), dg8)
            return dg8, None
        for_up = self.up.cast_args(Role.GRAD_OUTPUT, rowwise=rowwise or not of_up, columnwise=of_up)
        dg8, du8 = ops.gated_backward_quantize(da, g, u, self.activation, cast, for_gate, for_up)
        if self.gate.is_sampled(Role.GRAD_OUTPUT):
            self.gate.sample(Role.GRAD_OUTPUT, gated_backward(da, g, u, self.activation), dg8)
        if self.up.is_sampled(Role.GRAD_OUTPUT):
            self.up.sample(Role.GRAD_OUTPUT, gated(g, da, self.activation), du8)
        return dg8, du8


class GatedMLPFunction(torch.autograd.Function):
    """``y [R, N] = (activation(x wgᵀ) * (x wuᵀ)) wdᵀ + bd`` of ``x [..., K]``, with its nine GEMMs in FP8.

    Without wu, wg ``[2 F, K]`` has the rows of both, and there are six GEMMs. It saves the FP8 copies that wgrad
    multiplies, the outputs of gate and up, and the weights that dgrad casts again.
    """

    @staticmethod
    def forward(
        ctx: Any, mlp: GatedMLP, x: Tensor, wg: Tensor, wu: Tensor | None, wd: Tensor, bd: Tensor | None
    ) -> Tensor:
        needs_x, needs_wg, needs_wu, needs_wd, _ = ctx.needs_input_grad[1:]
        shared, up = mlp.shared, mlp.up
        g, x8 = mlp.gate.forward(x, wg, None, mlp.dtype, shared, columnwise=needs_wg)
        x8_up = u = None
        if up is not None and wu is not None:
            # After the cast, which has the amax.
            if shared is not None and not shared.serve(up.slots[Role.INPUT], up.observe):
                shared = None
            u, x8_up = up.forward(x, wu, None, mlp.dtype, shared, columnwise=needs_wu)
        a8 = mlp.activated(g, u, columnwise=needs_wd)
        y, _ = mlp.down.forward(a8, wd, bd, mlp.dtype)
        kept = (g, u) if needs_x or needs_wg or needs_wu else (None, None)
        of_gate_and_up = *mlp.gate.saved(x8), *mlp.gate.saved(x8_up)
        of_dgrad = *((wg, wu) if needs_x else (None, None)), None if kept[0] is None else wd
        ctx.save_for_backward(*of_dgrad, *kept, *of_gate_and_up, *mlp.down.saved(a8))
        ctx.mlp, ctx.x_shape, ctx.x_dtype = mlp, x.shape, x.dtype
        ctx.dtypes = tuple(None if each is None else each.dtype for each in (wg, wu, wd, bd))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a fused MLP")
        mlp: GatedMLP = ctx.mlp
        wg, wu, wd, g, u, *operands = ctx.saved_tensors
        of_wg, of_wu, of_wd, of_bd = ctx.dtypes
        needs_x, needs_wg, needs_wu, needs_wd, needs_bd = ctx.needs_input_grad[1:]
        dx = dwg = dwu = dwd = da = None
        if g is not None or needs_wd:
            a_t = mlp.down.unsaved(*operands[4:]) if needs_wd else None
            da, dwd = mlp.down.gradients(dy, wd, a_t, mlp.dtype, of_wd)
        if da is not None:
            dg8, du8 = mlp.gradients(da, g, u, rowwise=needs_x, of_gate=needs_wg, of_up=needs_wu)
            of_gate = mlp.gate.unsaved(*operands[:2]) if needs_wg else None
            dx, dwg = mlp.gate.gradients(dg8, wg, of_gate, ctx.x_dtype, of_wg)
            if mlp.up is not None and du8 is not None:
                of_up = mlp.up.unsaved(*operands[2:4]) if needs_wu else None
                of_x, dwu = mlp.up.gradients(du8, wu, of_up, ctx.x_dtype, of_wu)
                dx = dx if dx is None or of_x is None else dx.add_(of_x)
            dx = None if dx is None else dx.view(ctx.x_shape)
        dbd = bias_gradient(dy, of_bd) if needs_bd else None
        return None, dx, dwg, dwu, dwd, dbd
