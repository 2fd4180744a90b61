"""Casts to FP8: ``quantize`` and ``observe``."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.quantize import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.quantize import reference as _reference  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.quantize import schema as _schema  # noqa: F401  (defines the ops)
from lightning_fp8.ops.quantize.casting import Quantized, check_cast, run_cast
from lightning_fp8.scaled import Cast

__all__ = ["Quantized", "observe", "quantize"]

_quantize = op("quantize")
_quantize_unobserved = op("quantize_unobserved")
_observe = op("observe")


def quantize(
    x: Tensor,
    cast: Cast,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    scale_is_nonzero: bool = False,
    rowwise: bool = True,
    columnwise: bool = False,
    overflow_counts: Tensor | None = None,
) -> Quantized:
    """Cast ``x`` to FP8: ``round_to_nearest_even(clamp(x * scale, -max, max))``.

    Args:
        x: ``[R, K]`` in bfloat16, float16 or float32, any strides.
        cast: format and layout.
        scale: float32 ``[]``, layout ``tensor`` only; ``None`` or a value of 0 takes the scale from x's own amax.
        scale_is_nonzero: ``scale`` is known not to be 0, so that no amax has to be found in its place.
        amax: float32 ``[]``, raised to x's amax if that is larger; only with ``scale``.
        rowwise: whether to give the operand of x.
        columnwise: whether to give the operand of xᵀ, scaled along R.
        overflow_counts: int64 ``[2]``, grows by the numbers of values that were saturated and that became 0.

    Raises:
        TypeError: x is not a 2-D tensor in one of the three dtypes, or another tensor not in its own.
        ValueError: ``scale`` with a layout that is not ``tensor``, or ``amax`` without ``scale``; other shapes.
    """
    check_cast("quantize", x, cast, scale, amax)
    operands, _ = run_cast(
        _quantize, _quantize_unobserved, (x,), "", cast,
        scale=scale, amax=amax, scale_is_nonzero=scale_is_nonzero, rowwise=rowwise, columnwise=columnwise,
        overflow_counts=overflow_counts,
    )  # fmt: skip
    return operands


def observe(x: Tensor, amax: Tensor) -> None:
    """Raise ``amax`` (float32 ``[]``) to ``max |x|`` without casting; x is floating point, of any shape and strides.

    Raises:
        TypeError, ValueError: x is no such tensor, or ``amax`` of another dtype or shape, or elsewhere.
    """
    _observe(x, amax)
