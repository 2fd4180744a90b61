"""Amaxes, for scales that must be known before the cast."""

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
    thread_origin,
)
from cuda_kernels.kernel import Kernel, typed

_ONE, _ZERO = np.float32(1), np.float32(0)


@cache
def amax_kernel(loader: TileLoader, accumulate: bool) -> Kernel:
    """``max |x|`` of a tensor. A block processes every n-th tile.

    With ``accumulate``, ``amax_ptr [1]`` is updated with the maximum. Otherwise each block writes its maximum to
    ``amax_ptr [tensors, blocks]``, unless ``scale_ptr [1]`` is given and not 0.
    """
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile_at = loader.load_tile_at()
    origin_of = thread_origin(loader.vector)
    n_maxima, clear, fold, amax_of = maxima.num_registers, maxima.clear, maxima.fold, maxima.largest
    (own, own_words), tensors = loader.own, loader.tensors

    def amax(loader_args, scale_ptr, amax_ptr, rows, columns):
        scale_ptr = own(scale_ptr)
        if scale_ptr != 0 and load_f32(scale_ptr) != _ZERO:
            return
        thread = cuda.threadIdx.x
        registers, running_max = cuda.local.array(num_registers, u32), cuda.local.array(n_maxima, u32)
        clear(running_max)
        across = i32(i32(columns + TILE - 1) >> 7)
        end = i32(i32(i32(rows + TILE - 1) >> 7) * across * tensors)
        tile_idx = i32(cuda.blockIdx.x)
        origin = origin_of(thread)
        while tile_idx < end:
            load_tile_at(loader_args, tile_idx, origin, rows, columns, registers)
            for quad_index in range(WARP_ROWS):
                fold(registers, quad_index, decode(registers, quad_index), running_max)
            tile_idx = i32(tile_idx + cuda.gridDim.x)
        amax_bits = block_max(amax_of(running_max), dynamic_shared(), thread)
        if thread == 0:
            if accumulate:
                atomic_max(amax_ptr, amax_bits)
            else:
                amax_ptr = own_words(amax_ptr, cuda.gridDim.x >> (tensors - 1))
                store_f32(amax_ptr + i64(cuda.blockIdx.x >> (tensors - 1)) * 4, from_bits(amax_bits))

    return Kernel(
        f"amax({loader.name}, {accumulate=})",
        amax,
        {
            "loader_args": loader.args_type,
            "scale_ptr": loader.address_type,
            "amax_ptr": i64,
            **typed(i32, "rows columns"),
        },
        THREADS,
        shared_bytes=32,
        min_blocks_per_sm=loader.min_blocks_per_sm,
    )


@cache
def row_amax_kernel(loader: TileLoader, by_row: bool, by_column: bool) -> Kernel:
    """``max |x|`` of each row and each column, updating ``amaxes [tensors, rows + columns]``, rows first."""
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile = loader.load_tile()
    n_maxima, clear, take, fold = maxima.num_registers, maxima.clear, maxima.take, maxima.fold
    largest_of_columns, largest_of = maxima.largest_of_columns, maxima.largest
    _, own_words = loader.own

    def row_amax(loader_args, amaxes, rows, columns):
        amaxes = own_words(amaxes, rows + columns)
        registers = cuda.local.array(num_registers, u32)
        quad_maxima, column_maxima = cuda.local.array(n_maxima, u32), cuda.local.array(n_maxima, u32)
        _, tile_col, first_row, _, _ = load_tile(loader_args, cuda.blockIdx.x, rows, columns, registers)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        row_max = u32(0)
        clear(column_maxima)
        for quad_index in range(WARP_ROWS):
            quad = decode(registers, quad_index)
            take(registers, quad_index, quad, quad_maxima)
            if by_row:
                amax_bits = warp_max(largest_of(quad_maxima))
                row_max = amax_bits if lane == quad_index else row_max
            fold(registers, quad_index, quad, column_maxima)
        if by_row and lane < WARP_ROWS and first_row + lane < rows:
            atomic_max(amaxes + i64(first_row + lane) * 4, row_max)
        if by_column:
            smem = dynamic_shared()
            max_0, max_1, max_2, max_3 = largest_of_columns(column_maxima)
            shared_store_16(smem + warp * (4 * TILE) + lane * 16, max_0, max_1, max_2, max_3)
            cuda.syncthreads()
            if thread < TILE and tile_col + thread < columns:
                amax_bits = u32(0)
                for other_warp in range(WARPS):
                    amax_bits = unsigned_max(amax_bits, shared_load_4(smem + other_warp * (4 * TILE) + thread * 4))
                atomic_max(amaxes + (i64(rows) + tile_col + thread) * 4, amax_bits)

    return Kernel(
        f"row_amax({loader.name}, {by_row=}, {by_column=})",
        row_amax,
        {"loader_args": loader.args_type, "amaxes": i64, **typed(i32, "rows columns")},
        THREADS,
        shared_bytes=WARPS * TILE * 4,
        min_blocks_per_sm=max(1, loader.min_blocks_per_sm - 1),
    )
