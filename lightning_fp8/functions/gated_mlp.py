"""The autograd function of a gated MLP: two FP8 linear layers of one input, their activated product, and a third."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.linear import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.functions.shared_input import InputCast
from lightning_fp8.ops import Quantized
from lightning_fp8.ops.activation import gated, gated_backward
from lightning_fp8.scaled import Role


class GatedMLP(NamedTuple):
    """The settings of a :class:`GatedMLPFunction`.

    Attributes:
        activation: a name of :data:`lightning_fp8.ops.ACTIVATIONS` that is not gated.
        gate, up, down: the linear layers.
        dtype: the dtype of their outputs, and of the gradients between them.
        shared: the cast of the input, which other layers may read, too; None if it cannot be shared.
    """

    activation: str
    gate: Product
    up: Product
    down: Product
    dtype: torch.dtype
    shared: InputCast | None

    def activated(self, g: Tensor, u: Tensor, *, columnwise: bool) -> Quantized:
        """The input of the last layer, cast."""
        down = self.down
        args = down.cast_args(Role.INPUT, rowwise=True, columnwise=columnwise)
        made = ops.gated_quantize(g, u, self.activation, down.cast(Role.INPUT), **args)
        if down.is_sampled(Role.INPUT):
            down.sample(Role.INPUT, gated(g, u, self.activation), made)
        return made

    def gradients(
        self, da: Tensor, g: Tensor, u: Tensor, *, rowwise: bool, of_gate: bool, of_up: bool
    ) -> tuple[Quantized, Quantized]:
        """The gradients of the outputs of gate and up, cast; ``of_gate``, ``of_up``: also for a weight's."""
        for_gate = self.gate.cast_args(Role.GRAD_OUTPUT, rowwise=rowwise or not of_gate, columnwise=of_gate)
        for_up = self.up.cast_args(Role.GRAD_OUTPUT, rowwise=rowwise or not of_up, columnwise=of_up)
        # One pass would read da and g once: the place of a kernel that writes both.
        dg8 = ops.gated_backward_quantize(da, g, u, self.activation, self.gate.cast(Role.GRAD_OUTPUT), **for_gate)
        du8 = ops.gated_quantize(g, da, self.activation, self.up.cast(Role.GRAD_OUTPUT), **for_up)
        if self.gate.is_sampled(Role.GRAD_OUTPUT):
            self.gate.sample(Role.GRAD_OUTPUT, gated_backward(da, g, u, self.activation), dg8)
        if self.up.is_sampled(Role.GRAD_OUTPUT):
            self.up.sample(Role.GRAD_OUTPUT, gated(g, da, self.activation), du8)
        return dg8, du8


class GatedMLPFunction(torch.autograd.Function):
    """``y [R, N] = (activation(x wgᵀ) * (x wuᵀ)) wdᵀ + bd`` of ``x [..., K]``, with its nine GEMMs in FP8.

    It saves the FP8 copies that wgrad multiplies, the outputs of gate and up, and the parameters.
    """

    @staticmethod
    def forward(ctx: Any, mlp: GatedMLP, x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, bd: Tensor | None) -> Tensor:
        needs_x, needs_wg, needs_wu, needs_wd, _ = ctx.needs_input_grad[1:]
        shared, up = mlp.shared, mlp.up
        x8, g = mlp.gate.forward_of_input(x, wg, None, mlp.dtype, shared, columnwise=needs_wg)
        if shared is not None and not shared.serve(up.slots[Role.INPUT], up.observe):  # after the cast: it has the amax
            shared = None
        x8_up, u = up.forward_of_input(x, wu, None, mlp.dtype, shared, columnwise=needs_wu)
        a8 = mlp.activated(g, u, columnwise=needs_wd)
        y = mlp.down.forward(a8, wd, bd, mlp.dtype)
        kept = (g, u) if needs_x or needs_wg or needs_wu else (None, None)
        of_gate_and_up = *mlp.gate.saved(x8), *mlp.up.saved(x8_up)
        ctx.save_for_backward(wg, wu, wd, *kept, *of_gate_and_up, *mlp.down.saved(a8))
        ctx.mlp, ctx.x_shape, ctx.x_dtype = mlp, x.shape, x.dtype
        ctx.bias_dtype = None if bd is None else bd.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a fused MLP", "fuse=False")
        mlp: GatedMLP = ctx.mlp
        wg, wu, wd, g, u, *operands = ctx.saved_tensors
        needs_x, needs_wg, needs_wu, needs_wd, needs_bd = ctx.needs_input_grad[1:]
        dx = dwg = dwu = dwd = da = None
        if g is not None and needs_wd:
            da, dwd = mlp.down.gradients(dy, wd, mlp.down.unsaved(*operands[4:]), mlp.dtype, wd.dtype)
        else:
            dy8 = mlp.down.quantized_gradient(dy, rowwise=g is not None, columnwise=needs_wd)
            if g is not None:
                da = mlp.down.input_gradient(dy8, wd, mlp.dtype)
            if needs_wd:
                dwd = mlp.down.weight_gradient(dy8, mlp.down.unsaved(*operands[4:]), wd.dtype)
        if da is not None:
            dg8, du8 = mlp.gradients(da, g, u, rowwise=needs_x, of_gate=needs_wg, of_up=needs_wu)
            if needs_x:
                dx = mlp.gate.input_gradient(dg8, wg, ctx.x_dtype)
                dx.add_(mlp.up.input_gradient(du8, wu, ctx.x_dtype))
                dx = dx.view(ctx.x_shape)
            if needs_wg:
                dwg = mlp.gate.weight_gradient(dg8, mlp.gate.unsaved(*operands[:2]), wg.dtype)
            if needs_wu:
                dwu = mlp.up.weight_gradient(du8, mlp.up.unsaved(*operands[2:4]), wu.dtype)
        dbd = bias_gradient(dy, ctx.bias_dtype) if needs_bd else None
        return None, dx, dwg, dwu, dwd, dbd
