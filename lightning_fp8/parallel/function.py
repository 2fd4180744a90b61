"""The autograd function of a tensor-parallel linear layer, on the local tensors of a rank.

| mode | weight | x | y |
|---|---|---|---|
| column | ``[N / ranks, K]`` | ``[..., K]``, the same on all ranks | ``[..., N / ranks]`` |
| column, sequence | | a piece of the sequence, gathered | the whole sequence |
| row | ``[N, K / ranks]`` | ``[..., K / ranks]`` | ``[..., N]``, summed |
| row, sequence | | the whole sequence | a piece of the sequence |

If the layout has one scale per tensor, FP8 codes are gathered: 1 byte per element. Ranks then share this scale. It is
delayed scaling's, which is equal on all ranks, or is computed from the amax over the group. With other layouts the
forward pass gathers codes and scales. The backward pass needs copies with scales along rows and along columns, which
take as many bytes as BF16, so it gathers in high precision.

Sums are communicated in the results' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.functions.product import Product, bias_gradient, refuse_second_derivatives
from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import Role, ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.parallel.agreement import require_same
from lightning_fp8.parallel.collectives import Pending, amax_of_all, start_gather, start_scatter_of_sum, start_sum
from lightning_fp8.weights.fp8_tensor import transposed


@dataclass(frozen=True)
class Parallel:
    """How a linear layer is divided over ranks.

    Attributes:
        mode: ``"column"`` shards the weight's rows, the features of y; ``"row"`` shards its columns, the features of x.
        group: the ranks.
        sequence: with sequence parallelism, the dimension along which activations are divided outside the layer; else
            None.
        sums: without ``sequence``, y (row mode) and the gradient of x (column mode) are summed over the ranks. If
            False, the caller sums, and only the first rank adds the bias in row mode.
    """

    mode: Literal["column", "row"]
    group: dist.ProcessGroup
    sequence: int | None = None
    sums: bool = True

    @property
    def gathers_input(self) -> bool:
        """Whether the forward pass gathers x."""
        return self.mode == "column" and self.sequence is not None

    @property
    def leaves_sum(self) -> bool:
        """Whether the caller sums the ranks' results."""
        return self.sequence is None and not self.sums

    @property
    def gathers_gradient(self) -> bool:
        """Whether the backward pass gathers the gradient of y."""
        return self.mode == "row" and self.sequence is not None


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product,
    dtype: torch.dtype,
    parallel: Parallel,
) -> Tensor:
    """``x wᵀ + bias`` of a tensor-parallel layer.

    Args:
        x: this rank's ``[..., K]``. An FP8Tensor has been gathered before; ``parallel`` then has no sequence.
        weight: this rank's shard ``[N, K]``.
        bias: ``[N]``; this rank's shard in column mode, the whole bias in row mode.
        product: casts the tensors.
        dtype: the dtype of the result.
        parallel: how the layer is sharded.

    Returns:
        ``[..., N]`` in ``dtype``, as in the table above.

    Raises:
        RuntimeError: If recipes or the layer's sharding differ between ranks, on all ranks.
    """
    require_agreement(product.recipe, parallel, weight)
    y: Tensor = ParallelLinearFunction.apply(x, weight, bias, product, dtype, parallel)
    return y


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[Any]] = WeakKeyDictionary()
"""What the ranks of a group have been checked to agree on."""


def require_agreement(recipe: Recipe, parallel: Parallel, weight: Tensor | None = None) -> None:
    """At the first layer of each kind, compare over ranks what determines their collectives.

    Args:
        recipe, parallel: compared.
        weight: this rank's shard ``[N, K]``, whose shape is compared; None if only x is gathered.

    Raises:
        RuntimeError: If ranks differ, on all ranks; their collectives would hang.
    """
    agreed = _agreed.setdefault(parallel.group, set())
    shape = None if weight is None else tuple(weight.shape)
    key = recipe, parallel.mode, parallel.sequence, parallel.sums, shape
    if key in agreed:
        return
    whole = "whole sequences" if parallel.sequence is None else f"sequences cut along dimension {parallel.sequence}"
    piece = "" if shape is None else f", a piece of the weight of {shape}"
    what = "tensor-parallel ranks must run a layer by the same recipe and plan"
    require_same(what, f"{recipe}, {parallel.mode}, {whole}{piece}", parallel.group)
    agreed.add(key)


class ParallelLinearFunction(torch.autograd.Function):
    """The autograd function of :func:`parallel_linear`.

    In column mode with a sequence, this rank's piece of x is saved, and gathered again for the weight's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        dtype: torch.dtype,
        parallel: Parallel,
    ) -> Tensor:
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        shape = list(x.shape[:-1])
        kept: tuple[Tensor | None, Tensor | None] = None, None
        if parallel.gathers_input:
            assert parallel.sequence is not None
            x8, piece = gathered_forward(x, product, parallel)
            kept = (x, None) if piece is None else (piece.data, piece.scale_inv)
            shape[parallel.sequence] *= dist.get_world_size(parallel.group)
        else:
            x8 = product.quantize(_rows(x), Role.INPUT, columnwise=needs_wgrad)
            kept = product.saved(x8)
        is_row = parallel.mode == "row"
        y = product.forward(x8, weight, None if is_row else bias, dtype)[0].view(*shape, -1)
        if is_row:
            y = _start_reduction(y, parallel)()
            if bias is not None and not (parallel.leaves_sum and dist.get_rank(parallel.group)):
                y = y + bias.to(dtype)
        ctx.save_for_backward(*(kept if needs_wgrad else (None, None)), weight if needs_dgrad else None)
        ctx.product, ctx.parallel, ctx.x_shape = product, parallel, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("a tensor-parallel Linear")
        needs_dgrad, needs_wgrad, needs_bias_grad = ctx.needs_input_grad[:3]
        *kept, weight = ctx.saved_tensors
        product: Product = ctx.product
        parallel: Parallel = ctx.parallel
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        pending_x = _start_gather_of_kept(kept, product, parallel) if needs_wgrad and parallel.gathers_input else None
        dx = dw = dbias = pending_bias = None
        if needs_bias_grad:
            dbias = bias_gradient(_rows(dy), torch.float32)
            if parallel.gathers_gradient:  # each rank has a piece of the sequence
                pending_bias = start_sum(dbias, parallel.group)
        if needs_dgrad or needs_wgrad:
            if parallel.gathers_gradient:
                dy8 = gathered_backward(dy, product, parallel, rowwise=needs_dgrad, columnwise=needs_wgrad)
            else:
                dy8 = product.quantize(_rows(dy), Role.GRAD_OUTPUT, rowwise=needs_dgrad, columnwise=needs_wgrad)
        pending_dx: Pending | None = None
        if needs_dgrad:
            dx, _ = product.gradients(dy8, weight, None, x_dtype, weight_dtype)
            if parallel.mode == "column" and dx is not None:
                pending_dx = _start_reduction_of_input_gradient(dx, ctx.x_shape, parallel)
        if needs_wgrad:
            x_t = product.unsaved(*kept) if pending_x is None else pending_x()
            _, dw = product.gradients(dy8, None, x_t, x_dtype, weight_dtype)
        if pending_dx is not None:
            dx = pending_dx()
        if dbias is not None:
            dbias = (dbias if pending_bias is None else pending_bias()).to(bias_dtype)
        return None if dx is None else dx.view(ctx.x_shape), dw, dbias, None, None, None


# --- Casts of gathered tensors ----------------------------------------------------------------------------------------


def gathered_forward(
    x: Tensor, product: Product, parallel: Parallel, amax: Tensor | None = None
) -> tuple[Quantized, ScaledTensor | None]:
    """Cast this rank's shard ``x [..., K]``, and gather the shards of all ranks to the operand of the whole input.

    Args:
        x, product, parallel: see :func:`parallel_linear`.
        amax: float32 ``[]``, updated with this rank's amax under delayed scaling; None updates the product's slot.

    Returns:
        The operand; and, if the layout has one scale, the codes ``[..., K]`` of this rank's shard, otherwise None.
    """
    assert parallel.sequence is not None
    layout = product.cast(Role.INPUT).layout
    if layout.has_one_scale:
        piece = _cast_with_shared_scale(x, Role.INPUT, product, parallel.group, amax)
        whole = start_gather(piece.data, parallel.group, parallel.sequence)()
        return Quantized(ScaledTensor(_rows(whole), piece.scale_inv, layout), None), piece
    local = product.quantize(_rows(x), Role.INPUT).rowwise
    assert local is not None
    leading = x.shape[:-1]
    codes = start_gather(local.data.view(x.shape), parallel.group, parallel.sequence)
    scales = start_gather(local.scale_inv.contiguous().view(*leading, -1), parallel.group, parallel.sequence)
    return Quantized(ScaledTensor(_rows(codes()), _rows(scales()), layout), None), None


def gathered_backward(
    dy: Tensor, product: Product, parallel: Parallel, *, rowwise: bool, columnwise: bool
) -> Quantized:
    """The operands of the whole gradient, gathered from the ranks' pieces ``dy [..., N]``."""
    assert parallel.sequence is not None
    layout = product.cast(Role.GRAD_OUTPUT).layout
    if not layout.has_one_scale:
        whole = start_gather(dy, parallel.group, parallel.sequence)()
        return product.quantize(_rows(whole), Role.GRAD_OUTPUT, rowwise=rowwise, columnwise=columnwise)
    piece = _cast_with_shared_scale(dy, Role.GRAD_OUTPUT, product, parallel.group)
    codes = start_gather(piece.data, parallel.group, parallel.sequence)()
    operand = ScaledTensor(_rows(codes), piece.scale_inv, layout)
    return Quantized(operand if rowwise else None, transposed(operand) if columnwise else None)


def _cast_with_shared_scale(
    x: Tensor, role: Role, product: Product, group: dist.ProcessGroup, amax: Tensor | None = None
) -> ScaledTensor:
    """The codes of ``x [..., K]``, in its shape, with a scale that is equal on all ranks of the group."""
    cast, rows = product.cast(role), _rows(x)
    args = product.cast_args(role, rowwise=True, columnwise=False)
    scale = args["scale"]
    # Branch on the scale's value, which is equal on all ranks; ``scale_is_nonzero``, a fact of the host, may differ.
    if not isinstance(product.recipe, DelayedScaling) or not product.recipe.reduce_amax:  # each rank has its own scales
        scale = scaling.current_scale(amax_of_all(rows, group), cast.float8.max, cast.power_2_scale, cast.amax_epsilon)
    elif not args["scale_is_nonzero"] and not float(scale):  # type: ignore[arg-type]
        scale = scaling.current_scale(amax_of_all(rows, group), cast.float8.max)
    amax = args["amax"] if amax is None else amax
    made = ops.quantize(rows, cast, scale=scale, amax=amax, scale_is_nonzero=True).rowwise
    assert made is not None
    if product.is_sampled(role):
        product.sample(role, rows, Quantized(made, None))
    return ScaledTensor(made.data.view(x.shape), made.scale_inv, cast.layout)


def _start_gather_of_kept(kept: Any, product: Product, parallel: Parallel) -> Callable[[], ScaledTensor]:
    """The operand of xᵀ for the whole x, from the saved pieces of all ranks."""
    assert parallel.sequence is not None
    data, scale_inv = kept
    pending = start_gather(data, parallel.group, parallel.sequence)

    def wait() -> ScaledTensor:
        whole = _rows(pending())
        if scale_inv is not None:
            return transposed(product.unsaved(whole, scale_inv))
        made = product.quantize(whole, Role.INPUT, rowwise=False, columnwise=True, again=True).columnwise
        assert made is not None
        return made

    return wait


# --- Sums -------------------------------------------------------------------------------------------------------------


def _start_reduction(y: Tensor, parallel: Parallel) -> Pending:
    """Reduce the ranks' ``y``: to the sum or this rank's piece of it, or return y if the caller sums."""
    if parallel.leaves_sum:
        return lambda: y
    if parallel.sequence is None:
        return start_sum(y, parallel.group)
    return start_scatter_of_sum(y, parallel.group, parallel.sequence)


def _start_reduction_of_input_gradient(dx: Tensor, x_shape: torch.Size, parallel: Parallel) -> Pending:
    shape = list(x_shape)
    if parallel.sequence is not None:
        shape[parallel.sequence] *= dist.get_world_size(parallel.group)
    return _start_reduction(dx.view(shape), parallel)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
