"""A warp's products of E4M3 codes: read from swizzled shared memory by ldmatrix, multiplied by mma."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.mma.operands import LINE
from cuda_kernels.device.fragments import add_rows, ldmatrix_x4, mma, slice_fragment, slice_words, zeros
from cuda_kernels.device.language import device
from cuda_kernels.device.swizzle import swizzle_128b

STEP = 32
"""Bytes of a row that one mma multiplies."""
_COLUMNS = 32
"""Columns of a product that are computed at a time, so that few words of B are in registers."""


@device
def place_in_a(lane):
    """Where a lane's row of an operand A begins for ldmatrix, from the warp's first of 16 rows on."""
    row = lane & 15
    return row * LINE + swizzle_128b(row, lane >> 4)


@device
def place_in_b(lane):
    """The same of an operand B, from the first row on."""
    row = (lane & 7) + ((lane >> 4) << 3)
    return row * LINE + swizzle_128b(row, (lane >> 3) & 1)


@cache
def make_product(columns: int, k_steps: int, start: int = 0) -> Any:
    """A device function ``(a, b) -> acc``: a warp's product ``A [16, 32 k_steps] Bᵀ [.., columns]`` of E4M3 codes.

    ``a``, ``b``: addresses in shared memory, :func:`place_in_a` and :func:`place_in_b` from the operands' first rows.

    Args:
        start: the row of B that makes the first column; a multiple of 8.
    """
    width = min(columns, _COLUMNS)
    load_a = ldmatrix_x4(1, 16 * LINE)

    def of_step(step: int) -> Any:
        flip = STEP * step

        return device(lambda a: load_a(a ^ flip))

    product = _chained(width, tuple(of_step(step) for step in range(k_steps)), 0, start)
    if width == columns:
        return product
    others = make_product(columns - width, k_steps, start + width)

    @device
    def products(a, b):
        return product(a, b) + others(a, b)

    return products


@cache
def make_add_product(columns: int, k_steps: int, start: int = 0) -> Any:
    """A device function ``(sums, words, b, s, t) -> sums``: a product added in float32, its rows scaled.

    ``words``: A in registers, four for each step. ``b``: as :func:`make_product`'s. ``s``, ``t``: the scales of the
    thread's first row and of the row eight below. Some columns at a time, from ``start`` on, so that few of them are in
    registers twice.
    """
    words_of = tuple(slice_words(4 * k_steps, 4 * step, 4) for step in range(k_steps))
    multiply = _chained(_COLUMNS, words_of, 0, start)
    part, add = slice_fragment(columns // 2, start // 2, _COLUMNS // 2), add_rows(_COLUMNS // 2)

    @device
    def add_some(sums, words, b, s, t):
        return add(part(sums), multiply(words, b), s, t)

    if start + _COLUMNS == columns:
        return add_some
    others = make_add_product(columns, k_steps, start + _COLUMNS)

    @device
    def add_all(sums, words, b, s, t):
        return add_some(sums, words, b, s, t) + others(sums, words, b, s, t)

    return add_all


def _chained(columns: int, words_of: tuple[Any, ...], step: int, start: int) -> Any:
    """A device function ``(a, b) -> acc``: products from ``step`` on; ``words_of`` gives the words of A of each."""
    multiply, load_b, zero_acc = (
        mma(1, columns // 8, "e4m3", "e4m3"),
        ldmatrix_x4(columns // 16, 16 * LINE),
        zeros(columns // 2),
    )
    # The exclusive or comes first, so that a sum with a constant is left for the instruction.
    words, flip, offset = words_of[step], STEP * step, start * LINE

    if step == len(words_of) - 1:

        @device
        def last(a, b):
            return multiply(zero_acc(), words(a), load_b((b ^ flip) + offset))

        return last
    rest = _chained(columns, words_of, step + 1, start)

    @device
    def product(a, b):
        return multiply(rest(a, b), words(a), load_b((b ^ flip) + offset))

    return product
