"""E4M3 codes of a fragment's rows, with a scale per row of one tile, or of many.

The scale of many tiles is 448 over a limit that is doubled when a tile's largest magnitude exceeds it. The limit starts
as :data:`HEADROOM` times the largest magnitude of the first tile in which the row exceeds :data:`START`. Sums in units
of the scale are rescaled when it changes, by powers of two and so exactly, except when the limit starts. As the
reference's ``round_rows_running``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.attention.backward.statistics import CODE_UNIT, LARGEST_CODE, NO_AMAX
from cuda_kernels.attention.softmax import quad_max
from cuda_kernels.device.codec import INFINITY_BITS
from cuda_kernels.device.fragments import add_from_global, add_rows_to_global, pack_a_words, scale_rows
from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import bits, float_max, float_min, from_bits, reciprocal_approx, warp_any

START = NO_AMAX
"""The limit of a row that has been at most this so far."""

HEADROOM = np.float32(8)
"""Of a limit that starts: with 1, a warp changes limits in half of its tiles of the first 2,048 queries."""

_ONE, _INFINITY, _LARGEST = np.float32(1), np.float32(np.inf), np.finfo(np.float32).max
_MANTISSA = np.uint32(0x7FFFFF)
_TWO_TO_127 = np.uint32(0x7F000000)


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


@device
def outgrown(amax, limit):
    """Whether the limit has to change; NaN exceeds every limit."""
    return not amax <= limit


@device
def refitted(amax, limit):
    """A limit that ``amax`` does not exceed, and the factor of sums in units of the old one."""
    if not outgrown(amax, limit):
        return limit, _ONE
    ratio = amax * reciprocal_approx(limit)
    power = (bits(ratio) + _MANTISSA) & INFINITY_BITS  # rounded up
    grown = limit * from_bits(power)
    # Restart if doubling is impossible: the limit is not set, or a value is NaN, inf or out of float32's range.
    if limit == START or not ratio < _INFINITY or not grown < _INFINITY:
        return amax * HEADROOM, reciprocal_approx(ratio * HEADROOM)
    return grown, from_bits(_TWO_TO_127 - power)


@device
def row_scale(factor, limit):
    """What turns a row's values before ``factor`` into codes.

    It is finite for every factor, so that a row of zeros has codes of 0 while its limit is :data:`START`. Codes are too
    small if a row's values before ``factor`` are below ``448 * 2**-128``.
    """
    return float_min(factor * LARGEST_CODE * reciprocal_approx(limit), _LARGEST)


@cache
def make_running_rows(
    scores_count: int, sums_count: int, threads: int, early: bool = True
) -> tuple[Any, Any, Any, Any]:
    """Device functions for a thread's two rows, whose scales all tiles share, and for sums in units of these.

    ``limits``: of both rows' scales. ``sums``: accumulated by the tensor cores.

    - ``(x, amax, amax_below, factor, sums, limits) -> words, sums, limits``: ``x``, a tile of both rows, times
      ``factor``, as an operand A; ``amax``: the largest magnitudes of ``x`` in this thread's columns. If a row exceeds
      its limit, ``sums`` and ``limits`` change.
    - ``(sums, limits, scratch, first)`` adds the sums, in float32, to this thread's sums in global memory, whose
      previous contents are ignored if ``first``.
    - ``(sums, limits) -> sums`` in float32.
    - ``(sums, scratch) -> sums`` adds the sums in global memory.

    Args:
        scores_count, sums_count: registers of a tile, and of the sums.
        threads: scratch memory is for so many.
        early: codes do not wait for the vote on new limits. They then need registers of their own.
    """
    codes_of, scale_sums = make_row_codes(scores_count), scale_rows(sums_count)
    add_to_global, come_back = add_rows_to_global(sums_count, threads), add_from_global(sums_count, threads)
    store_to_global = add_rows_to_global(sums_count, threads, True)

    @device
    def words_of(x, factor, limits):
        return codes_of(x, row_scale(factor, limits[0]), row_scale(factor, limits[1]))

    @device
    def rounded(x, amax, amax_below, factor, sums, limits):
        # Limits change rarely. Until then the four threads of a row need no common maximum.
        words = words_of(x, factor, limits) if early else ()
        if warp_any(outgrown(amax * factor, limits[0]) or outgrown(amax_below * factor, limits[1])):
            limit, factor_of_sums = refitted(quad_max(amax) * factor, limits[0])
            limit_below, factor_below = refitted(quad_max(amax_below) * factor, limits[1])
            sums, limits = scale_sums(sums, factor_of_sums, factor_below), (limit, limit_below)
            if early:
                words = words_of(x, factor, limits)
        if not early:
            words = words_of(x, factor, limits)
        return words, sums, limits

    @device
    def leave(sums, limits, scratch, first):
        if first:
            store_to_global(sums, limits[0] * CODE_UNIT, limits[1] * CODE_UNIT, scratch)
        else:
            add_to_global(sums, limits[0] * CODE_UNIT, limits[1] * CODE_UNIT, scratch)

    @device
    def finished(sums, limits):
        return scale_sums(sums, limits[0] * CODE_UNIT, limits[1] * CODE_UNIT)

    return rounded, leave, finished, come_back
