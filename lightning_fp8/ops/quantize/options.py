"""The options of a cast and their text form: ``"e4m3 1x128 power_2 rowwise columnwise"``.

What is computed before the cast stands before a comma: ``"swiglu, e4m3 tensor rowwise"``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lightning_fp8.formats import FORMATS, Float8
from lightning_fp8.ops.core.options import parse_options
from lightning_fp8.scaled import Cast, Layout


class QuantizeOptions(NamedTuple):
    """The options of a cast.

    Attributes:
        float8: the format of the codes; ``e4m3`` or ``e5m2``.
        layout: which elements share a scale; a :class:`Layout`'s value.
        power_2: scales from the tensor's own amaxes are rounded down to powers of two.
        epsilon: those amaxes count as at least this; ``epsilon=0.5``.
        rowwise: the operand of x is asked for.
        columnwise: the operand of xᵀ is asked for.
        scale_is_nonzero: the given scale is known not to be 0; ``nonzero``.
    """

    float8: Float8
    layout: Layout
    power_2: bool
    epsilon: float
    rowwise: bool
    columnwise: bool
    scale_is_nonzero: bool


def refuse_scale(layout: Layout) -> None:
    """Check a layout whose scale is given.

    Raises:
        ValueError: it has one scale for each block.
    """
    if not layout.has_one_scale:
        raise ValueError(f"layout {layout.value!r} scales each block from itself; scale must be None")


def format_quantize_options(
    cast: Cast, rowwise: bool = True, columnwise: bool = False, scale_is_nonzero: bool = False
) -> str:
    """The text form of the options of a recipe's ``cast``."""
    return cast.text + _USAGE[rowwise, columnwise, scale_is_nonzero]


_USAGE = {
    (rowwise, columnwise, nonzero): " rowwise" * rowwise + " columnwise" * columnwise + " nonzero" * nonzero
    for rowwise in (False, True)
    for columnwise in (False, True)
    for nonzero in (False, True)
}


@lru_cache(maxsize=4096)
def parse_quantize_options(text: str) -> QuantizeOptions:
    """Parse what :func:`format_quantize_options` gives, with or without words before a comma.

    Raises:
        ValueError: it names no format and layout first, or an option that :class:`QuantizeOptions` does not have.
    """
    name, _, rest = text.rpartition(", ")[2].partition(" ")
    layout, _, words = rest.partition(" ")
    if name not in FORMATS:
        raise ValueError(f"options={text!r} names the format {name!r}; use one of {', '.join(FORMATS)}")
    options = parse_options(words, ("power_2", "epsilon", "rowwise", "columnwise", "nonzero"))
    return QuantizeOptions(
        FORMATS[name],
        Layout(layout),
        power_2="power_2" in options,
        epsilon=float(options.get("epsilon", 0.0)),
        rowwise="rowwise" in options,
        columnwise="columnwise" in options,
        scale_is_nonzero="nonzero" in options,
    )
