"""E4M3 codes of a fragment's rows, with a scale per row and tile."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.backward.statistics import CODE_UNIT, LARGEST_CODE, NO_AMAX
from cuda_kernels.attention.softmax import quad_max
from cuda_kernels.device.fragments import pack_a_words, scale_rows
from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import float_max, reciprocal_approx


@device
def tile_scales(amax, amax_below):
    """Scales of two rows of a tile, and their inverses: ``scale, scale_below, unit, unit_below``.

    ``amax``, ``amax_below``: the rows' largest magnitudes in this thread's columns. A scale is 448 over the row's.
    """
    amax, amax_below = float_max(quad_max(amax), NO_AMAX), float_max(quad_max(amax_below), NO_AMAX)
    return (
        LARGEST_CODE * reciprocal_approx(amax),
        LARGEST_CODE * reciprocal_approx(amax_below),
        amax * CODE_UNIT,
        amax_below * CODE_UNIT,
    )


@cache
def make_row_codes(num_registers: int) -> Any:
    """A device function ``(x, scale, scale_below) -> words``: ``num_registers`` float32 as codes, an operand A."""
    scale_x, pack = scale_rows(num_registers), pack_a_words(num_registers, "e4m3")

    @device
    def codes_of(x, scale, scale_below):
        return pack(scale_x(x, scale, scale_below))

    return codes_of
