"""The FP8 ops: ``torch.ops.lightning_fp8`` behind functions that take and give :class:`ScaledTensor`.

They allocate and dispatch by device; they know no gradients and no modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops import gemm as _gemm  # noqa: F401  (registers the products)
from lightning_fp8.ops import reference as _reference  # noqa: F401  (registers the implementation)
from lightning_fp8.ops import schema as _schema  # noqa: F401  (defines the ops)
from lightning_fp8.ops.config import quantize_config, scaled_mm_config
from lightning_fp8.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.scaling import AmaxAlgorithm

_ops = torch.ops.lightning_fp8

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


class Quantized(NamedTuple):
    """The GEMM operands of one tensor ``x [R, K]``: x itself, and xᵀ ``[K, R]``; what was not asked for is None."""

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    may_be_0: bool = True,
    rowwise: bool = True,
    columnwise: bool = False,
    counts: Tensor | None = None,
) -> Quantized:
    """Cast ``x`` to FP8: ``round_to_nearest_even(clamp(x * scale, -max, max))``.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32, any strides.
        cast: format and layout.
        scale: float32 ``[]``, layout ``tensor`` only; ``None`` or a value of 0 takes the scale from x's own amax.
        may_be_0: False where ``scale`` is known not to be 0, which saves asking.
        amax: float32 ``[]``, raised to x's amax if that is larger; only with ``scale``.
        rowwise: whether to give the operand of x.
        columnwise: whether to give the operand of xᵀ, scaled along R.
        counts: int64 ``[2]``, grows by the numbers of values that were saturated and that were flushed to zero.

    Raises:
        TypeError: x is not a 2-D tensor in one of the three dtypes, or ``scale``, ``amax`` or ``counts`` not in theirs.
        ValueError: ``scale`` with a layout that is not ``tensor``, or ``amax`` without ``scale``; other shapes.
    """
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize {x.dtype}; cast to one of {', '.join(map(str, HIGH_PRECISION))} first")
    if x.dim() != 2:
        raise TypeError(f"quantize takes a 2-D tensor, not shape {tuple(x.shape)}; flatten the leading dimensions")
    if cast.layout is not Layout.TENSOR and scale is not None:
        raise ValueError(f"layout {cast.layout.value!r} scales each block from itself; scale must be None")
    if amax is not None and scale is None:
        raise ValueError("amax is collected for a given scale; pass scale too (0 takes x's own)")
    view = gives_a_view(x, cast, columnwise)
    config = quantize_config(cast, rowwise or view, columnwise and not view, not may_be_0)
    if amax is None and counts is None:
        results = _ops.quantize_unobserved.default(x, config, scale)
    else:
        results = _ops.quantize.default(x, config, scale, amax, counts)
    return quantized(results, cast, rowwise, columnwise, view)


def gives_a_view(x: Tensor, cast: Cast, columnwise: bool) -> bool:
    """Whether xᵀ is given as a view: the reference's GEMM reads codes in either order, a card's does not."""
    return columnwise and cast.layout.transposes and not x.is_cuda


def quantized(results: Sequence[Tensor], cast: Cast, rowwise: bool, columnwise: bool, view: bool) -> Quantized:
    """The operands that an op gave."""
    data, scale_inv, data_t, scale_inv_t = results
    row = ScaledTensor(data, scale_inv, cast.layout) if rowwise or view else None
    if view and row is not None:
        return Quantized(row if rowwise else None, row.t())
    if not columnwise:
        return Quantized(row, None)
    return Quantized(row, ScaledTensor(data_t, scale_inv if cast.layout is Layout.TENSOR else scale_inv_t, cast.layout))


def observe(x: Tensor, amax: Tensor) -> None:
    """Raise ``amax`` (float32 ``[]``) to ``max |x|`` without casting; x is floating point, of any shape and strides.

    Raises:
        TypeError, ValueError: x is no such tensor, or ``amax`` of another dtype or shape, or elsewhere.
    """
    _ops.observe.default(x, amax)


def scaled_mm(
    a: ScaledTensor,
    b: ScaledTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """``a @ bᵀ + bias`` of two K-major FP8 operands, accumulated in float32, rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        bias: ``[N]``, added before rounding.
        out_dtype: bfloat16, float16 or float32.
        fast_accum: allow the tensor core's shorter accumulator (a hint; the CPU has none).
        amax: float32 ``[]``, raised to the largest magnitude of the result, as :func:`observe` would.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError, ValueError: the contractions differ; ``bias`` or ``amax`` of another dtype or shape, or elsewhere.
    """
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(f"out_dtype={out_dtype} must be one of {', '.join(map(str, HIGH_PRECISION))}")
    _check_contractions(a, b)
    config = scaled_mm_config(a.layout, b.layout, out_dtype, fast_accum)
    operands = a.data, a.scale_inv, b.data, b.scale_inv, config, bias
    return _ops.scaled_mm.default(*operands) if amax is None else _ops.scaled_mm_observed.default(*operands, amax)


def _check_contractions(a: ScaledTensor, b: ScaledTensor) -> None:
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(
            f"contractions differ: a is {tuple(a.data.shape)}, b is {tuple(b.data.shape)}; both are K-major"
        )


def scaled_mm_accumulate(out: Tensor, a: ScaledTensor, b: ScaledTensor) -> None:
    """``out += a @ bᵀ`` with ``out [M, N]`` in float32 (a weight's ``main_grad``).

    Raises:
        TypeError, ValueError: the contractions differ, or ``out`` has another dtype or shape, or is elsewhere.
    """
    _check_contractions(a, b)
    config = scaled_mm_config(a.layout, b.layout, torch.float32)
    _ops.scaled_mm_accumulate.default(out, a.data, a.scale_inv, b.data, b.scale_inv, config)


def update_scales(
    amax: Tensor,
    amax_history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    margin: float,
    algorithm: AmaxAlgorithm,
    recompute: bool = True,
) -> None:
    """The delayed-scaling update of all rows: push ``amax`` into ``amax_history``, compute ``scale``, zero ``amax``.

    Args:
        amax: float32 ``[n]``.
        amax_history: float32 ``[len, n]``, oldest first; its first row is 0 between updates, as in Transformer
            Engine.
        scale: float32 ``[n]``.
        fp8_max: float32 ``[n]``, the largest value of each row's format.
        margin: binary digits of head room.
        algorithm: ``"max"`` of the history or its ``"most_recent"`` row.
        recompute: False only advances the history (``interval`` of the recipe).

    Raises:
        TypeError, ValueError: a tensor of another dtype or shape, or elsewhere; another algorithm, or no such margin.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"algorithm={algorithm!r} is unknown; use 'max' or 'most_recent'")
    if not -126 <= margin <= 126:
        raise ValueError(f"margin={margin} must lie from -126 to 126, as float32's exponents do")
    _ops.update_scales.default(amax, amax_history, scale, fp8_max, margin, algorithm, recompute)
