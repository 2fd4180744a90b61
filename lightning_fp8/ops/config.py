"""How an op casts or multiplies, in one string: ``"e4m3 1x128 power_2 rowwise columnwise"``, ``"row row bfloat16"``.

What is computed before the cast comes before a comma: ``"swiglu, e4m3 tensor rowwise"``. Every argument costs the
dispatcher time at every call, and a cast has seven; the string is parsed once.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import torch

from lightning_fp8.formats import FORMATS, Float8
from lightning_fp8.scaled import Cast, Layout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Dtypes that are not FP8, and what strings and kernels call them."""


class QuantizeConfig(NamedTuple):
    """What the string says.

    Attributes:
        float8, layout: of the codes, ``e4m3`` or ``e5m2``, and of the scales, as :class:`Layout` names them.
        power_2: scales from the tensor's own amaxes are powers of two.
        epsilon: those amaxes count as at least this; ``epsilon=0.5``.
        rowwise, columnwise: which operands to give.
        nonzero: the given scale is known not to be 0.
    """

    float8: Float8
    layout: Layout
    power_2: bool
    epsilon: float
    rowwise: bool
    columnwise: bool
    nonzero: bool

    def refuse_scale(self) -> None:
        """Called where a scale is given.

        Raises:
            ValueError: the layout has one for each block.
        """
        if self.layout is not Layout.TENSOR:
            raise ValueError(f"layout {self.layout.value!r} scales each block from itself; scale must be None")


def quantize_config(cast: Cast, rowwise: bool = True, columnwise: bool = False, nonzero: bool = False) -> str:
    """The string for a recipe's ``cast``."""
    return cast.text + _WORDS[rowwise, columnwise, nonzero]


_WORDS = {
    (rowwise, columnwise, nonzero): " rowwise" * rowwise + " columnwise" * columnwise + " nonzero" * nonzero
    for rowwise in (False, True)
    for columnwise in (False, True)
    for nonzero in (False, True)
}


@lru_cache(maxsize=4096)
def parse_quantize_config(text: str) -> QuantizeConfig:
    """What ``text`` says of the cast.

    Raises:
        ValueError: it names no format and layout first, or says a word that is none of :class:`QuantizeConfig`'s.
    """
    name, _, rest = text.rpartition(", ")[2].partition(" ")
    layout, _, words = rest.partition(" ")
    if name not in FORMATS:
        raise ValueError(f"config={text!r} names the format {name!r}; use one of {', '.join(FORMATS)}")
    said = options_of(words, ("power_2", "epsilon", "rowwise", "columnwise", "nonzero"))
    flags = ("rowwise" in said, "columnwise" in said, "nonzero" in said)
    return QuantizeConfig(FORMATS[name], Layout(layout), "power_2" in said, float(said.get("epsilon", 0.0)), *flags)


class ScaledMMConfig(NamedTuple):
    """What the string of a product says.

    Attributes:
        a, b: layouts of the operands' scales.
        out: dtype of the result.
        fast: the tensor core's shorter accumulator will do.
    """

    a: Layout
    b: Layout
    out: torch.dtype
    fast: bool


def scaled_mm_config(a: Layout, b: Layout, out: torch.dtype, fast: bool = False) -> str:
    """The string for a product."""
    return f"{a.value} {b.value} {NAMES[out]}" + " fast" * fast


@lru_cache
def parse_scaled_mm_config(text: str) -> ScaledMMConfig:
    """What ``text`` says.

    Raises:
        ValueError: it says something else.
    """
    words = text.split()
    if len(words) not in (3, 4) or words[2] not in DTYPES or words[3:] not in ([], ["fast"]):
        raise ValueError(f"config={text!r} is not two layouts and one of {', '.join(DTYPES)}, with or without fast")
    return ScaledMMConfig(Layout(words[0]), Layout(words[1]), DTYPES[words[2]], len(words) == 4)


def options_of(words: str, known: Collection[str]) -> dict[str, str]:
    """``"a b=1"`` as ``{"a": "", "b": "1"}``.

    Raises:
        ValueError: a name is not ``known``.
    """
    said = {name: value for name, _, value in (word.partition("=") for word in words.split())}
    if unknown := said.keys() - set(known):
        raise ValueError(f"{words!r} says {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return said
