"""Largest magnitudes, for scales that must be known before the cast."""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.device.language import cuda, i32, i64, u32
from cuda_kernels.device.ptx import (
    atomic_max,
    dynamic_shared,
    from_bits,
    load_f32,
    shared_load_4,
    shared_store_16,
    store_f32,
    unsigned_max,
    warp_max,
)
from cuda_kernels.device.tile import (
    THREADS,
    TILE,
    WARP_ROWS,
    WARPS,
    TileLoader,
    block_max,
    position,
    thread_origin,
)
from cuda_kernels.kernel import Kernel

_ONE, _ZERO = np.float32(1), np.float32(0)


@cache
def amax_kernel(loader: TileLoader, accumulate: bool) -> Kernel:
    """``max |x|`` of a tensor, by blocks that each take every n-th tile.

    ``accumulate``: the maximum raises ``amax [1]``. Otherwise ``amax [blocks]`` gets one for each block, and nothing
    happens where ``scale [1]`` (if it is given) is not 0.
    """
    load, decode, maxima, num_registers = loader.load, loader.decode, loader.maxima, loader.num_registers
    origin_of = thread_origin(loader.vector)
    n_kept, clear, fold, largest_kept = maxima.num_registers, maxima.clear, maxima.fold, maxima.largest

    def amax(x, scale, amax, rows, columns):
        if scale != 0 and load_f32(scale) != _ZERO:
            return
        thread = cuda.threadIdx.x
        registers, kept = cuda.local.array(num_registers, u32), cuda.local.array(n_kept, u32)
        clear(kept)
        across = i32(i32(columns + TILE - 1) >> 7)
        end = i32(i32(i32(rows + TILE - 1) >> 7) * across)
        tile = i32(cuda.blockIdx.x)
        # As TileLoader.load_tile, whose thread_origin would be computed again for each tile.
        row_in_tile, column_in_tile = origin_of(thread)
        while tile < end:
            first_row, first_column, whole = position(tile, rows, columns)
            row, column = i32(first_row + row_in_tile), i32(first_column + column_in_tile)
            load(x, rows, columns, row, column, whole, registers)
            for step in range(WARP_ROWS):
                fold(registers, step, decode(registers, step), kept)
            tile = i32(tile + cuda.gridDim.x)
        largest = block_max(largest_kept(kept), dynamic_shared(), thread)
        if thread == 0:
            if accumulate:
                atomic_max(amax, largest)
            else:
                store_f32(amax + i64(cuda.blockIdx.x) * 4, from_bits(largest))

    return Kernel(
        f"amax({loader.name}, {accumulate=})",
        amax,
        (loader.args_type, i64, i64, i32, i32),
        THREADS,
        shared_bytes=32,
        min_blocks_per_sm=loader.min_blocks_per_sm,
    )


@cache
def row_amax_kernel(loader: TileLoader, by_row: bool, by_column: bool) -> Kernel:
    """``max |x|`` of each row and each column, raised in ``rows_amax [rows]`` and ``columns_amax [columns]``."""
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile = loader.load_tile()
    n_kept, clear, take, fold = maxima.num_registers, maxima.clear, maxima.take, maxima.fold
    columns_of, largest_of = maxima.columns, maxima.largest

    def row_amax(x, rows_amax, columns_amax, rows, columns):
        registers = cuda.local.array(num_registers, u32)
        quad_maxima, column_maxima = cuda.local.array(n_kept, u32), cuda.local.array(n_kept, u32)
        _, first_column, row, _, _ = load_tile(x, cuda.blockIdx.x, rows, columns, registers)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        row_max = u32(0)
        clear(column_maxima)
        for step in range(WARP_ROWS):
            quad = decode(registers, step)
            take(registers, step, quad, quad_maxima)
            if by_row:
                largest = warp_max(largest_of(quad_maxima))
                row_max = largest if lane == step else row_max
            fold(registers, step, quad, column_maxima)
        if by_row and lane < WARP_ROWS and row + lane < rows:
            atomic_max(rows_amax + i64(row + lane) * 4, row_max)
        if by_column:
            shared = dynamic_shared()
            a, b, c, d = columns_of(column_maxima)
            shared_store_16(shared + warp * (4 * TILE) + lane * 16, a, b, c, d)
            cuda.syncthreads()
            if thread < TILE and first_column + thread < columns:
                largest = u32(0)
                for other_warp in range(WARPS):
                    largest = unsigned_max(largest, shared_load_4(shared + other_warp * (4 * TILE) + thread * 4))
                atomic_max(columns_amax + i64(first_column + thread) * 4, largest)

    return Kernel(
        f"row_amax({loader.name}, {by_row=}, {by_column=})",
        row_amax,
        (loader.args_type, i64, i64, i32, i32),
        THREADS,
        shared_bytes=WARPS * TILE * 4,
        min_blocks_per_sm=max(1, loader.min_blocks_per_sm - 1),
    )
