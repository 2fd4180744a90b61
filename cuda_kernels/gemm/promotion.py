"""Where no more than 128 products are summed up in a tensor core: their sums, scaled, are added in float32.

Scales of A's rows, and of B's where each has its own, come with their operands to shared memory. They are read before
the products are started, as far as there are registers, so that the place is free once these are done. Scales of blocks
of B, one or two of which a tile has, are read from global memory for 32 steps at once, long before the first of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import add, add_rows, add_rows_and_columns, add_rows_of_two, column_pairs
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import from_bits, load_4_if, shared_load_4, shuffle
from cuda_kernels.gemm.spec import ACCUMULATORS, Product, Scaling, Tile, places

_BLOCK = 128
"""Rows of B that have one scale."""


def reads_ahead(product: Product, tile: Tile) -> bool:
    """Whether nothing is left to read when the products are done. Results that are stored one by one take registers."""
    of_columns = tile.columns // 4 if product.scaling is Scaling.BLOCKS else 0
    most = ACCUMULATORS if tile.staged or tile.even else ACCUMULATORS - 40
    return tile.columns // 2 * (tile.waves + 1) + of_columns <= most


@cache
def scales_of_place(product: Product, tile: Tile) -> Any:
    """A device function ``(smem, place, line) -> scales``, for :func:`adder`.

    ``line``: of this thread's first register in the tile.
    """
    at = places(tile, product.scaling)
    rows = tile.rows
    columns = tile.columns
    at_a, at_b = at["scale_a"], at["scale_b"]
    if not product.scaling.along_k:
        return device(lambda smem, place, line: i32(0))

    @device
    def of_rows(smem, place, line):
        scales = smem + at_a + (place * rows + line) * 4
        return from_bits(shared_load_4(scales)), from_bits(shared_load_4(scales + 32))

    @device
    def of_columns(smem, place):
        return i32(smem + at_b + place * (4 * columns) + 8 * (cuda.threadIdx.x & 3))

    if product.scaling is Scaling.BLOCK:
        return of_rows
    if not reads_ahead(product, tile):
        return device(lambda smem, place, line: (of_rows(smem, place, line), of_columns(smem, place)))
    loaded = column_pairs(tile.columns // 2)
    return device(lambda smem, place, line: (of_rows(smem, place, line), loaded(of_columns(smem, place))))


@cache
def adder(product: Product, tile: Tile) -> Any:
    """A device function ``(acc, part, scales, of_blocks, column) -> acc + part``, part scaled.

    ``of_blocks``: what :func:`scales_of_blocks` gives for the step; ``column``: the tile's first.
    """
    count = tile.columns // 2
    plus = add(count)
    plus_rows = add_rows(count)
    plus_rows_of_two = add_rows_of_two(count)
    if not product.scaling.along_k:
        return device(lambda acc, part, scales, of_blocks, column: plus(acc, part))
    if product.scaling is Scaling.BLOCKS:
        plus_both = add_rows_and_columns(count, reads_ahead(product, tile))
        return device(
            lambda acc, part, scales, of_blocks, column: plus_both(acc, part, scales[0][0], scales[0][1], scales[1])
        )
    if _BLOCK % tile.columns == 0:
        return device(
            lambda acc, part, scales, of_blocks, column: plus_rows(
                acc, part, scales[0] * of_blocks[0], scales[1] * of_blocks[0]
            )
        )

    @device
    def plus_of_two(acc, part, scales, of_blocks, column):
        s, t = scales
        first, second = of_blocks
        left = i32(_BLOCK - (column & (_BLOCK - 1)))
        return plus_rows_of_two(acc, part, s * first, t * first, s * second, t * second, left)

    return plus_of_two


def steps_at_once(scaling: Scaling) -> int:
    """For how many steps scales of blocks are loaded, one by each lane; all, where there are none."""
    return 32 if scaling is Scaling.BLOCK else 1 << 30


@cache
def scales_of_blocks(columns: int) -> tuple[Any, Any]:
    """Device functions that know the scales of a tile's blocks of B, which is so wide: loaded at once for 32 steps.

    A tile is in one block, or begins in one and ends in the next: 128 columns are a multiple of its own, or of those
    that it has more.

    Returns:
        ``(scale_b, pitch, column, n, step, steps) -> held``: of the tile that begins at ``column``, from ``step`` on,
        each lane another step's. ``(held, step) -> (first, second)``: a step's.
    """
    two = _BLOCK % columns > 0

    @device
    def load(scale_b, pitch, column, n, step, steps):
        block = column >> 7
        mine = i32(step + (cuda.threadIdx.x & 31))
        address = scale_b + (i64(block) * pitch + mine) * 4
        first = load_4_if(address, mine < steps and column < n)
        second = first
        if two:
            second = load_4_if(address + pitch * 4, mine < steps and (block + 1) * _BLOCK < n)
        return first, second

    @device
    def of_step(held, step):
        first = from_bits(shuffle(held[0], step & 31))
        second = first
        if two:
            second = from_bits(shuffle(held[1], step & 31))
        return first, second

    return load, of_step
