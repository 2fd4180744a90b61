"""A warp's products of E4M3 codes: loaded from swizzled shared memory by ldmatrix, multiplied by mma."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.mma.operands import LINE, TILE
from cuda_kernels.attention.spec import ROWS
from cuda_kernels.device.fragments import add_rows, ldmatrix_x4, mma, slice_fragment, slice_words, zeros
from cuda_kernels.device.language import device
from cuda_kernels.device.swizzle import along_row

STEP = 32
"""Bytes of a row multiplied by one mma."""
_COLUMNS = 32
"""Columns of a product that are computed at a time, so that few words of B are in registers."""


_Step = tuple[Any, int, int]
"""One mma of a chain: a device function from A, in registers or its address, to its words; the first byte of a row that
it multiplies; and the byte offset of its panel of B."""


@cache
def make_product(
    columns: int, k_steps: int, start: int = 0, panels: int = 1, panel_rows: int = ROWS,
    behind: tuple[int, int] = (0, 0),
) -> Any:  # fmt: skip
    """A device function ``(a_address, b_address) -> acc``: a warp's product ``A [16, K] Bᵀ [K, columns]``.

    A and B are E4M3 codes. The addresses in shared memory are ``ldmatrix_a`` and ``ldmatrix_b`` from the operands'
    first rows. ``K``: 32 ``k_steps`` channels of each of ``panels`` consecutive panels.

    Args:
        columns: the number of columns of the product.
        k_steps: see above.
        start: the row of B for the first column; a multiple of 8.
        panels: see above.
        panel_rows: rows of a panel of B; a panel of A has 128.
        behind: byte offsets from the addresses of A and B to the operands. Added here, they become part of the
            instruction, and operands of several products share their addresses.
    """
    width = min(columns, _COLUMNS)
    load_a = ldmatrix_x4(1, 16 * LINE)

    def words_of(k_byte: int, panel: int) -> Any:
        return device(lambda a_address: load_a(along_row(a_address, k_byte) + panel))

    steps = tuple(
        (words_of(STEP * step, panel * TILE + behind[0]), STEP * step, panel * panel_rows * LINE + behind[1])
        for panel in range(panels)
        for step in range(k_steps)
    )
    product = _chained(width, steps, start)
    if width == columns:
        return product
    others = make_product(columns - width, k_steps, start + width, panels, panel_rows, behind)

    @device
    def products(a_address, b_address):
        return product(a_address, b_address) + others(a_address, b_address)

    return products


@cache
def make_add_product(columns: int, k_steps: int, start: int = 0) -> Any:
    """A device function ``(sums, words, b_address, s, t) -> sums`` that adds a product with scaled rows.

    Sums are float32. ``words``: A in registers, four per step. ``b_address``: see :func:`make_product`. ``s``, ``t``:
    the scales of the thread's first row and of the row eight below. Columns are processed in parts, from ``start`` on,
    so that few of them are in registers twice.
    """
    steps = tuple((slice_words(4 * k_steps, 4 * step, 4), STEP * step, 0) for step in range(k_steps))
    multiply = _chained(_COLUMNS, steps, start)
    part, add = slice_fragment(columns // 2, start // 2, _COLUMNS // 2), add_rows(_COLUMNS // 2)

    @device
    def add_some(sums, words, b_address, s, t):
        return add(part(sums), multiply(words, b_address), s, t)

    if start + _COLUMNS == columns:
        return add_some
    others = make_add_product(columns, k_steps, start + _COLUMNS)

    @device
    def add_all(sums, words, b_address, s, t):
        return add_some(sums, words, b_address, s, t) + others(sums, words, b_address, s, t)

    return add_all


def _chained(columns: int, steps: tuple[_Step, ...], start: int) -> Any:
    """A device function ``(a, b_address) -> acc`` of these steps; ``a`` is the argument of their ``words``."""
    multiply, zero_acc = mma(1, columns // 8, "e4m3", "e4m3"), zeros(columns // 2)
    load_b = ldmatrix_x4(columns // 16, 16 * LINE)
    # The step along the row is applied first, so that adding a constant becomes part of the instruction.
    (words, k_byte, panel), *others = steps
    offset = start * LINE + panel

    if not others:

        @device
        def last(a, b_address):
            return multiply(zero_acc(), words(a), load_b(along_row(b_address, k_byte) + offset))

        return last
    rest = _chained(columns, tuple(others), start)

    @device
    def product(a, b_address):
        return multiply(rest(a, b_address), words(a), load_b(along_row(b_address, k_byte) + offset))

    return product
