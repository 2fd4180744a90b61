"""The options of a GEMM and their text form: ``"1x128 128x128 bfloat16 fast"``."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from lightning_fp8.ops.core.options import DTYPE_NAMES, DTYPES
from lightning_fp8.scaled import Layout


class ScaledMMOptions(NamedTuple):
    """The options of a GEMM.

    Attributes:
        layout_a, layout_b: which elements of the operands share a scale.
        out_dtype: the dtype of the result.
        fast_accum: the tensor core's shorter accumulator is allowed.
    """

    layout_a: Layout
    layout_b: Layout
    out_dtype: torch.dtype
    fast_accum: bool


def format_scaled_mm_options(
    layout_a: Layout, layout_b: Layout, out_dtype: torch.dtype, fast_accum: bool = False
) -> str:
    """The text form of a GEMM's options."""
    return f"{layout_a.value} {layout_b.value} {DTYPE_NAMES[out_dtype]}" + " fast" * fast_accum


@lru_cache
def parse_scaled_mm_options(text: str) -> ScaledMMOptions:
    """Parse what :func:`format_scaled_mm_options` gives.

    Raises:
        ValueError: ``text`` has another form.
    """
    words = text.split()
    if len(words) not in (3, 4) or words[2] not in DTYPES or words[3:] not in ([], ["fast"]):
        raise ValueError(f"options={text!r} is not two layouts and one of {', '.join(DTYPES)}, with or without fast")
    return ScaledMMOptions(Layout(words[0]), Layout(words[1]), DTYPES[words[2]], len(words) == 4)
