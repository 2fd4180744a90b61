"""The autograd function of a norm, an FP8 linear layer, an activation and a second FP8 linear layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.layernorm_linear import norm_gradients, quantized_norm
from lightning_fp8.functions.norm import Norm, normalize
from lightning_fp8.functions.product import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import Normalized, Quantized
from lightning_fp8.ops.activation import activated, activated_backward


class MLP(NamedTuple):
    """The settings of a :class:`LayerNormMLPFunction`.

    Attributes:
        norm: the norm of the input.
        activation: a name of :data:`lightning_fp8.ops.ACTIVATIONS`.
        fc1: the linear layer before the activation.
        fc2: the linear layer after the activation.
        dtype: the dtype of the outputs of the linear layers, and of the gradients between them.
        recompute: save only the input, and recompute everything except fc2 in the backward pass.
        gives_norm: also return the norm's output.
    """

    norm: Norm
    activation: str
    fc1: Product
    fc2: Product
    dtype: torch.dtype
    recompute: bool
    gives_norm: bool

    def first_half(
        self, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        *, columnwise: bool, again: bool = False,
    ) -> tuple[Normalized, Tensor]:  # fmt: skip
        """The norm's result, and the output of fc1: ``[R, F]``, or ``[R, 2 F]`` with a gated activation."""
        normed = quantized_norm(x, norm_weight, norm_bias, self.norm, self.fc1, columnwise=columnwise, again=again)
        h, _ = self.fc1.forward(normed.operands, weight, bias, self.dtype, again=again)
        return normed, h

    def activated(self, h: Tensor, *, rowwise: bool, columnwise: bool, again: bool = False) -> Quantized:
        """The input of fc2, given the output of fc1."""
        args = self.fc2.cast_args(Role.INPUT, rowwise=rowwise, columnwise=columnwise, again=again)
        made = ops.activation_quantize(h, self.activation, self.fc2.cast(Role.INPUT), **args)
        if self.fc2.is_sampled(Role.INPUT) and not again:
            self.fc2.sample(Role.INPUT, activated(h, self.activation), made)
        return made


class LayerNormMLPFunction(torch.autograd.Function):
    """``y [R, N] = activation(norm(x [R, K]) w1ᵀ + b1) w2ᵀ + b2`` with its six GEMMs in FP8.

    It saves x, the norm's statistics, the output of the first layer, the FP8 copies that wgrad multiplies, and the
    parameters. With ``recompute`` it saves only x and the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, mlp: MLP, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
        w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        needs = ctx.needs_input_grad[1:]
        keeps = not mlp.recompute
        normed, h = mlp.first_half(x, norm_weight, norm_bias, w1, b1, columnwise=needs[3] and keeps)
        a8 = mlp.activated(h, rowwise=True, columnwise=needs[5] and keeps)
        y, _ = mlp.fc2.forward(a8, w2, b2, mlp.dtype)
        if mlp.recompute:
            ctx.save_for_backward(x, norm_weight, w1, w2, norm_bias, b1)
        else:
            of_norm = (x, norm_weight) if any(needs[:3]) else (None, None)
            of_fc1 = (normed.statistics, h) if any(needs[:5]) else (None, None)
            operands = *mlp.fc1.saved(normed.operands), *mlp.fc2.saved(a8)
            ctx.save_for_backward(*of_norm, w1, w2, *of_fc1, *operands)
        ctx.mlp = mlp
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (b1, b2)]
        ctx.set_materialize_grads(False)
        if not mlp.gives_norm:
            return y
        return y, normalize(x, norm_weight, norm_bias, mlp.norm, x.shape[1:], mlp.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, of_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("LayerNormMLP")
        x, norm_weight, w1, w2, *kept = ctx.saved_tensors
        mlp: MLP = ctx.mlp
        needs = ctx.needs_input_grad[1:]
        needs_norm = any(needs[:3])
        needs_w1, needs_b1, needs_w2, needs_b2 = needs[3:]
        needs_first = needs_norm or needs_w1 or needs_b1
        if mlp.recompute:
            norm_bias, b1 = kept
            normed, h = mlp.first_half(x, norm_weight, norm_bias, w1, b1, columnwise=needs_w1, again=True)
            statistics, n_t = normed.statistics, normed.operands.columnwise
            a_t = mlp.activated(h, rowwise=False, columnwise=True, again=True).columnwise if needs_w2 else None
        else:
            statistics, h, *operands = kept
            n_t = mlp.fc1.unsaved(*operands[:2]) if needs_w1 else None
            a_t = mlp.fc2.unsaved(*operands[2:]) if needs_w2 else None
        da = dnormed = dw1 = db1 = dw2 = db2 = None
        if dy is not None and (needs_first or needs_w2):
            da, dw2 = mlp.fc2.gradients(dy, w2 if needs_first else None, a_t, mlp.dtype, w2.dtype)
        if dy is not None and needs_b2:
            db2 = bias_gradient(dy, ctx.bias_dtypes[1])
        if da is not None:
            dh8, db1 = ops.activation_backward_quantize(
                da,
                h,
                mlp.activation,
                mlp.fc1.cast(Role.GRAD_OUTPUT),
                bias_dtype=ctx.bias_dtypes[0] if needs_b1 else None,
                **mlp.fc1.cast_args(Role.GRAD_OUTPUT, rowwise=needs_norm or not needs_w1, columnwise=needs_w1),
            )
            if mlp.fc1.is_sampled(Role.GRAD_OUTPUT):
                mlp.fc1.sample(Role.GRAD_OUTPUT, activated_backward(da, h, mlp.activation), dh8)
            dnormed, dw1 = mlp.fc1.gradients(dh8, w1 if needs_norm else None, n_t, mlp.dtype, w1.dtype)
        of_norm_and_x: tuple[Tensor | None, ...] = (None, None, None)
        if needs_norm:
            of_norm_and_x = norm_gradients(dnormed, of_norm, x, norm_weight, statistics, mlp.norm, needs[2])
        return None, *of_norm_and_x, dw1, db1, dw2, db2
