"""Largest magnitudes, for scales that must be known before the cast."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from cuda_kernels.codec import (
    largest_of,
    magnitude,
    quad_magnitude,
)
from cuda_kernels.launch import Kernel
from cuda_kernels.ptx import (
    atomic_max,
    dynamic_shared,
    from_bits,
    i32,
    i64,
    load_f32,
    shared_load_4,
    shared_store_16,
    store_f32,
    u32,
    unsigned_max,
    warp_max,
)
from cuda_kernels.tile import (
    THREADS,
    TILE,
    WARP_ROWS,
    WARPS,
    Source,
    block_max,
    position,
)

_ONE, _ZERO = np.float32(1), np.float32(0)


@cache
def amax_kernel(source: Source, accumulate: bool) -> Kernel:
    """``max |x|`` of a tensor, by blocks that each take every n-th tile.

    ``accumulate``: the maximum raises ``amax [1]``. Otherwise ``amax [blocks]`` gets one for each block, and nothing
    happens where ``scale [1]`` (if it is given) is not 0.
    """
    load, decode, held = source.load, source.decode, source.registers

    def amax(x, scale, amax, rows, columns):
        if scale != 0 and load_f32(scale) != _ZERO:
            return
        thread = cuda.threadIdx.x
        registers = cuda.local.array(held, u32)
        largest = u32(0)
        across = (columns + i32(TILE - 1)) >> i32(7)
        end = ((rows + i32(TILE - 1)) >> i32(7)) * across
        tile = cuda.blockIdx.x
        while tile < end:
            first_row, first_column = position(tile, columns)
            row, column = first_row + WARP_ROWS * (thread >> 5), first_column + 4 * (thread & 31)
            load(x, rows, columns, row, column, registers)
            for step in range(WARP_ROWS):
                a, b, c, d = decode(registers, step)
                largest = unsigned_max(largest, quad_magnitude(a, b, c, d))
            tile += cuda.gridDim.x
        largest = block_max(largest, dynamic_shared(), thread)
        if thread == 0:
            if accumulate:
                atomic_max(amax, largest)
            else:
                store_f32(amax + i64(cuda.blockIdx.x) * 4, from_bits(largest))

    return Kernel(
        f"amax({source.name}, {accumulate=})",
        amax,
        (source.words_type, i64, i64, i32, i32),
        THREADS,
        shared_bytes=32,
        blocks_per_multiprocessor=source.blocks,
    )


@cache
def row_amax_kernel(source: Source, by_row: bool, by_column: bool) -> Kernel:
    """``max |x|`` of each row and each column, raised in ``rows_amax [rows]`` and ``columns_amax [columns]``."""
    load, decode, held = source.load, source.decode, source.registers

    def row_amax(x, rows_amax, columns_amax, rows, columns):
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        first_row, first_column = position(cuda.blockIdx.x, columns)
        row, column = first_row + WARP_ROWS * warp, first_column + 4 * lane
        registers = cuda.local.array(held, u32)
        load(x, rows, columns, row, column, registers)
        of_columns = cuda.local.array(4, u32)
        for index in range(4):
            of_columns[index] = u32(0)
        of_row = u32(0)
        for step in range(WARP_ROWS):
            a, b, c, d = decode(registers, step)
            a, b, c, d = magnitude(a), magnitude(b), magnitude(c), magnitude(d)
            if by_row:
                largest = warp_max(largest_of(a, b, c, d))
                of_row = largest if lane == step else of_row
            of_columns[0], of_columns[1] = unsigned_max(of_columns[0], a), unsigned_max(of_columns[1], b)
            of_columns[2], of_columns[3] = unsigned_max(of_columns[2], c), unsigned_max(of_columns[3], d)
        if by_row and lane < WARP_ROWS and row + lane < rows:
            atomic_max(rows_amax + i64(row + lane) * 4, of_row)
        if by_column:
            shared = dynamic_shared()
            shared_store_16(
                shared + warp * (4 * TILE) + lane * 16, of_columns[0], of_columns[1], of_columns[2], of_columns[3]
            )
            cuda.syncthreads()
            if thread < TILE and first_column + thread < columns:
                largest = u32(0)
                for other in range(WARPS):
                    largest = unsigned_max(largest, shared_load_4(shared + other * (4 * TILE) + thread * 4))
                atomic_max(columns_amax + i64(first_column + thread) * 4, largest)

    return Kernel(
        f"row_amax({source.name}, {by_row=}, {by_column=})",
        row_amax,
        (source.words_type, i64, i64, i32, i32),
        THREADS,
        shared_bytes=WARPS * TILE * 4,
        blocks_per_multiprocessor=max(1, source.blocks - 1),
    )
