"""The running softmax of a warpgroup's rows: probabilities of a tile of keys as codes, and their sums."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.attention.spec import TILE_ROW, TILE_VALID
from cuda_kernels.device.fragments import exp2_rows, pack_a_words, rows_max, rows_sum
from cuda_kernels.device.language import device, i64
from cuda_kernels.device.ptx import bits, exp2_approx, float_max, from_bits, reciprocal_approx, shuffle_xor, store_f32

TOP = np.float32(8)
"""log2 of the code of a tile's largest probability: 256 is the largest power of two in E4M3."""
REACH = np.float32(40)
"""A tile's unit is at least 2**-40 of a row's largest value so far, so that rescaling does not overflow."""
_ZERO, _MINUS_INFINITY = np.float32(0), np.float32(-np.inf)

START = (_MINUS_INFINITY, _MINUS_INFINITY, _MINUS_INFINITY, _MINUS_INFINITY, _ZERO, _ZERO)
"""The initial state of two rows, eight apart: largest scores, units, sums."""


@device
def quad_max(x):
    """The maximum over the four lanes that share a row."""
    x = float_max(x, from_bits(shuffle_xor(bits(x), 1)))
    return float_max(x, from_bits(shuffle_xor(bits(x), 2)))


@device
def quad_sum(x):
    x = x + from_bits(shuffle_xor(bits(x), 1))
    return x + from_bits(shuffle_xor(bits(x), 2))


@device
def next_unit(top, largest, unit):
    """A row's largest score and unit after a tile, the offset of its scores, and the factor of its previous sums.

    ``top``: the tile's largest score. A row without visible keys so far has the unit -inf, and its sums stay 0.
    """
    largest = float_max(largest, top)
    new = float_max(top, largest - REACH)
    zero = _ZERO if new == _MINUS_INFINITY else new
    return largest, new, TOP - zero, exp2_approx(unit - zero)


@cache
def make_softmax(num_keys: int) -> tuple[Any, Any]:
    """Device functions for the scores of a tile: products of codes that, times ``factor``, are logarithms to base 2.

    Pairs are for the thread's two rows. The first, ``(scores, factor, softmax_state) -> softmax_state, offsets,
    alphas``, gives rows' largest scores and units including this tile; offsets of its logarithms; factors of the
    previous sums, which are not yet applied to the state's own sums. The second, ``(scores, factor, offsets, alphas,
    softmax_state) -> words, softmax_state``, gives the tile's probabilities as E4M3 codes, an operand A; 256 represents
    the row's unit. Sums are over this thread's columns, of probabilities before rounding.
    """
    num_registers = num_keys // 2
    largest_of, sum_of, power = rows_max(num_registers), rows_sum(num_registers), exp2_rows(num_registers)
    pack = pack_a_words(num_registers, "e4m3")

    @device
    def rebase(scores, factor, softmax_state):
        largest, largest_below, unit, unit_below, total, total_below = softmax_state
        top, top_below = largest_of(scores)
        largest, unit, offset, alpha = next_unit(quad_max(top * factor), largest, unit)
        largest_below, unit_below, offset_below, alpha_below = next_unit(
            quad_max(top_below * factor), largest_below, unit_below
        )
        softmax_state = (largest, largest_below, unit, unit_below, total, total_below)
        return softmax_state, (offset, offset_below), (alpha, alpha_below)

    @device
    def probabilities(scores, factor, offsets, alphas, softmax_state):
        largest, largest_below, unit, unit_below, total, total_below = softmax_state
        exponentials = power(scores, factor, offsets[0], offsets[1])
        more, more_below = sum_of(exponentials)
        total, total_below = total * alphas[0] + more, total_below * alphas[1] + more_below
        return pack(exponentials), (largest, largest_below, unit, unit_below, total, total_below)

    return rebase, probabilities


@cache
def make_whole_softmax(num_keys: int) -> Any:
    """Both functions of :func:`make_softmax`: ``(scores, factor, softmax_state) -> words, softmax_state, alphas``."""
    rebase, probabilities = make_softmax(num_keys)

    @device
    def softmax(scores, factor, softmax_state):
        softmax_state, offsets, alphas = rebase(scores, factor, softmax_state)
        words, softmax_state = probabilities(scores, factor, offsets, alphas, softmax_state)
        return words, softmax_state, alphas

    return softmax


@device
def _row_statistics(largest, unit, total, inside):
    """Whether a row attends to any key, its largest score and its sum of exponentials.

    ``total``: over all its columns. ``inside``: whether the row exists.
    """
    seen = inside and total != _ZERO
    return (
        seen,
        largest if seen else _MINUS_INFINITY,
        total * exp2_approx(unit - largest - TOP) if seen else _ZERO,
    )


@device
def store_statistics(softmax_state, m, l, tile, head, rows_q, row_in_tile, lane):  # noqa: E741
    """Store the maximum ``m`` and the sum ``l`` of rows ``row_in_tile`` and ``row_in_tile + 8`` of a tile of queries.

    ``softmax_state``: after the last tile of keys. ``m``, ``l``: addresses of float32 ``[H, rows_q]``.

    It returns ``inverse, inverse_below, seen, seen_below``: the factors of the sums of P V, and whether the rows attend
    to any key.
    """
    valid = tile[TILE_VALID]
    largest, largest_below, unit, unit_below, total, total_below = softmax_state
    total, total_below = quad_sum(total), quad_sum(total_below)
    inverse, inverse_below = reciprocal_approx(total), reciprocal_approx(total_below)
    seen, largest, total = _row_statistics(largest, unit, total, row_in_tile < valid)
    seen_below, largest_below, total_below = _row_statistics(
        largest_below, unit_below, total_below, row_in_tile + 8 < valid
    )
    if lane & 3 == 0:
        place = (i64(head) * rows_q + tile[TILE_ROW] + row_in_tile) * 4
        store_f32(m + place, largest)
        store_f32(m + place + 32, largest_below)
        store_f32(l + place, total)
        store_f32(l + place + 32, total_below)
    return inverse, inverse_below, seen, seen_below
