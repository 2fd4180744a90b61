"""The common part of the public functions that cast: checks, options, and GEMM operands made of an op's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from torch import Tensor

from lightning_fp8.ops.core.options import HIGH_PRECISION
from lightning_fp8.ops.quantize.options import format_quantize_options, refuse_scale
from lightning_fp8.scaled import Cast, Layout, ScaledTensor


class Quantized(NamedTuple):
    """The GEMM operands of one tensor ``x [R, K]``: x itself, and xᵀ ``[K, R]``; what was not asked for is None."""

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None


def check_cast(
    op: str, x: Tensor, cast: Cast, scale: Tensor | None = None, amax: Tensor | None = None, **others: object
) -> None:
    """Check what every function that casts takes; ``op`` is its name.

    Raises:
        TypeError: x is not a 2-D tensor in bfloat16, float16 or float32.
        ValueError: ``scale`` with a layout that has several, or ``amax`` without ``scale``.
    """
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize {x.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")
    if x.dim() != 2:
        raise TypeError(f"{op} takes a 2-D tensor, not shape {tuple(x.shape)}; flatten the leading dimensions")
    if scale is not None:
        refuse_scale(cast.layout)
    elif amax is not None:
        raise ValueError("amax is collected for a given scale; pass scale too (0 takes x's own)")


class CastArgs(TypedDict, total=False):
    """The keywords of every function that casts; :func:`lightning_fp8.ops.quantize` says what they are."""

    scale: Tensor | None
    amax: Tensor | None
    scale_is_nonzero: bool
    rowwise: bool
    columnwise: bool
    overflow_counts: Tensor | None


def run_cast(
    op: Callable[..., Sequence[Tensor]], op_unobserved: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None], prologue: str, cast: Cast, *, scale: Tensor | None = None,
    amax: Tensor | None = None, scale_is_nonzero: bool = False, rowwise: bool = True, columnwise: bool = False,
    overflow_counts: Tensor | None = None,
) -> tuple[Quantized, Sequence[Tensor]]:  # fmt: skip
    """Call an op that casts, and make GEMM operands of its results.

    Args:
        op: ``(*inputs, options_text, *io) -> data, scale_inv, data_t, scale_inv_t, *more``.
        op_unobserved: the same without what it may write to.
        prologue: what ``options`` says before the cast, comma included.
        scale, amax, scale_is_nonzero, rowwise, columnwise, overflow_counts: :class:`CastArgs`.

    Returns:
        The operands, and what else the op gives.
    """
    view = gives_a_view(inputs[0], cast, columnwise)
    options_text = prologue + format_quantize_options(cast, rowwise or view, columnwise and not view, scale_is_nonzero)
    observed = amax is not None or overflow_counts is not None
    results = (
        op(*inputs, options_text, scale, amax, overflow_counts)
        if observed
        else op_unobserved(*inputs, options_text, scale)
    )
    return operands_of(results[:4], cast.layout, rowwise, columnwise, view), results[4:]


def operands_of(results: Sequence[Tensor], layout: Layout, rowwise: bool, columnwise: bool, view: bool) -> Quantized:
    """The operands of what a cast gives; ``view``: that of xᵀ is a view of the other."""
    data, scale_inv, data_t, scale_inv_t = results
    rowwise_operand = ScaledTensor(data, scale_inv, layout) if rowwise or view else None
    if not columnwise:
        return Quantized(rowwise_operand, None)
    if rowwise_operand is not None and view:
        return Quantized(rowwise_operand if rowwise else None, rowwise_operand.t())
    return Quantized(rowwise_operand, ScaledTensor(data_t, scale_inv if layout.has_one_scale else scale_inv_t, layout))


def gives_a_view(x: Tensor | None, cast: Cast, columnwise: bool) -> bool:
    """Whether xᵀ is given as a view: the reference's GEMM reads codes in either order, a GPU's does not."""
    return columnwise and cast.layout.transposes and x is not None and not x.is_cuda
