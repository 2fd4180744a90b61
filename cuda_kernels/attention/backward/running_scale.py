"""The scale of a row that many tiles share: 448 over a limit that doubles when a tile's largest magnitude outgrows it.

The limit starts as the largest magnitude of the first tile in which the row is not 0. Sums in units of the scale are
rescaled when it changes, by powers of two, and so exactly. As the reference's ``round_rows_running``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.attention.backward.statistics import LARGEST_CODE, NO_AMAX
from cuda_kernels.device.fragments import pack_a_words, scale_rows
from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import bits, from_bits, reciprocal_approx, warp_any

START = NO_AMAX
"""The limit of a row that has been 0 so far."""

_ONE, _INFINITY = np.float32(1), np.float32(np.inf)
_EXPONENT, _MANTISSA = np.uint32(0x7F800000), np.uint32(0x7FFFFF)
_TWO_TO_127 = np.uint32(0x7F000000)


@device
def outgrown(amax, limit):
    """Whether the limit has to change; NaN outgrows everything."""
    return not amax <= limit


@device
def refitted(amax, limit):
    """A limit that ``amax`` does not outgrow, and what sums in units of the old one are multiplied by."""
    if not outgrown(amax, limit):
        return limit, _ONE
    ratio = amax * reciprocal_approx(limit)
    power = (bits(ratio) + _MANTISSA) & _EXPONENT  # rounded up
    grown = limit * from_bits(power)
    # Anew where there is nothing to double, or no power of two that does: NaN, inf, a ratio beyond float32.
    if limit == START or not ratio < _INFINITY or not grown < _INFINITY:
        return amax, _ONE
    return grown, from_bits(_TWO_TO_127 - power)


@cache
def make_running_codes(scores_count: int, sums_count: int) -> tuple[Any, Any]:
    """Device functions over two rows' limits, for tiles and sums of so many registers.

    Returns:
        ``(sums, amax, amax_below, limits) -> sums, limits`` and ``(x, factor, limits) -> words``.
    """
    scale, pack = scale_rows(scores_count), pack_a_words(scores_count, "e4m3")
    scale_sums = scale_rows(sums_count)

    @device
    def refit_sums(sums, amax, amax_below, limits):
        """``sums`` and the limits of both rows' scales, after a tile with these largest magnitudes."""
        limit, limit_below = limits
        if warp_any(outgrown(amax, limit) or outgrown(amax_below, limit_below)):
            limit, factor = refitted(amax, limit)
            limit_below, factor_below = refitted(amax_below, limit_below)
            sums = scale_sums(sums, factor, factor_below)
        return sums, (limit, limit_below)

    @device
    def codes_of(x, factor, limits):
        """Words of an operand A: rows of ``x`` times ``factor`` in units of their scales."""
        largest = factor * LARGEST_CODE
        return pack(scale(x, largest * reciprocal_approx(limits[0]), largest * reciprocal_approx(limits[1])))

    return refit_sums, codes_of
