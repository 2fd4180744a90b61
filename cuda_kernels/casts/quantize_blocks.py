"""Tensors to FP8, rowwise and transposed, from one read; with a scale for each block; otherwise as ``quantize.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.casts.overflow import add_overflow_counts, counting_cast, min_blocks_per_sm
from cuda_kernels.device.codec import FP8_MAX, amax_to_scale, e8m0_code, e8m0_scale, magnitude
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    divide,
    dynamic_shared,
    from_bits,
    shared_load_4,
    shared_load_16,
    shared_store_4,
    shared_store_16,
    shuffle,
    shuffle_xor,
    store_1,
    store_f32,
    unsigned_max,
    warp_max,
)
from cuda_kernels.device.tile import (
    THREADS,
    TILE,
    TRANSPOSED_BYTES,
    WARP_ROWS,
    WARPS,
    TileLoader,
    block_max,
    row_of_quad,
    row_storer,
    store_transposed,
)
from cuda_kernels.kernel import Kernel, KernelError, typed

_ONE, _ZERO = np.float32(1), np.float32(0)

MX_COLUMNS = 32
"""Columns of a block of MX, whose scale is E8M0 (OCP Microscaling Formats 1.0)."""
BLOCKS = {"1x128": (1, TILE), "128x128": (TILE, TILE), "1x32": (1, MX_COLUMNS)}
"""Rows and columns of a block that has a scale, by layout; each divides a tile."""


def _exchange(values: int, distance: int) -> Any:
    """A device function ``(maxima, lane)``: two lanes ``distance`` apart reduce ``values`` maxima.

    Each keeps half of the results, the upper lane the upper half.
    """
    half = values // 2

    @device
    def exchange(maxima, lane):
        upper = lane & distance != 0
        for index in range(half):
            low, high = maxima[index], maxima[half + index]
            kept = high if upper else low
            sent = low if upper else high
            maxima[index] = unsigned_max(kept, shuffle_xor(sent, distance))

    return exchange


def _reduce_scatter_max(lanes: int) -> Any:
    """A device function ``(maxima, lane)`` that reduces ``2 * lanes`` maxima over ``lanes`` neighbouring lanes.

    Lane n of them then has the maxima number 2 n and 2 n + 1, as its first two.
    """
    first = _exchange(2 * lanes, lanes // 2)
    second, third = _exchange(lanes, lanes // 4), _exchange(4, 1)

    @device
    def reduce_scatter_4(maxima, lane):
        first(maxima, lane)
        second(maxima, lane)

    @device
    def reduce_scatter_8(maxima, lane):
        first(maxima, lane)
        second(maxima, lane)
        third(maxima, lane)

    return reduce_scatter_4 if lanes == 4 else reduce_scatter_8


@cache
def quantize_blocks_kernel(
    loader: TileLoader, fp8: str, layout: str, rowwise: bool, columnwise: bool, count: bool
) -> Kernel:
    """One scale for each block of ``layout``, one of :data:`BLOCKS`, from the block itself.

    ``out_scale_inv`` is ``[blocks of a row, out_scale_inv_stride]``, rows contiguous, as a GEMM reads them and so that
    neighbouring threads write neighbours; those of ``out_t`` likewise, columns contiguous. The scales of ``"128x128"``
    are ``[block rows, block columns]``, in ``out_t_scale_inv`` transposed.

    Raises:
        KernelError: another layout.
    """
    if layout not in BLOCKS:
        raise KernelError(f"layout={layout!r} has no kernel; blocks are {', '.join(BLOCKS)}")
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile = loader.load_tile()
    row_of = row_of_quad(loader.vector)
    store_rows = row_storer(loader.vector)
    n_maxima, clear, take, fold = maxima.num_registers, maxima.clear, maxima.take, maxima.fold
    columns_of, largest_of = maxima.columns, maxima.largest
    cast, cast_columns = counting_cast(fp8, count), counting_cast(fp8, count and not rowwise)
    fp8_max = FP8_MAX[fp8]
    reciprocal_max = _ONE / fp8_max
    block_rows, block_columns = BLOCKS[layout]
    block_2d = block_rows > 1
    microscaled = block_columns == MX_COLUMNS
    row_scales_from_warp = rowwise and not block_2d and not microscaled
    quads_of_row = loader.vector // 4
    lanes_of_block = MX_COLUMNS // loader.vector
    n_vectors = WARP_ROWS // quads_of_row
    reduce_scatter = _reduce_scatter_max(lanes_of_block)
    amax_smem = TRANSPOSED_BYTES
    scale_smem = TRANSPOSED_BYTES + WARPS * TILE * 4

    def quantize_blocks(
        x, counts, out, out_scale_inv, out_t, out_t_scale_inv,
        rows, columns, power_2, epsilon, out_stride, out_scale_inv_stride, out_t_stride, out_t_scale_inv_stride,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        smem = dynamic_shared()
        registers = cuda.local.array(num_registers, u32)
        first_row, first_column, row, column, full_tile = load_tile(x, cuda.blockIdx.x, rows, columns, registers)
        block_row, block_column = i64(first_row >> i32(7)), i64(first_column >> i32(7))

        # Quads are decoded once for what they are needed for before they are cast.
        vector_maxima, column_maxima = (
            cuda.local.array(n_maxima, u32),
            cuda.local.array(n_maxima, u32),
        )
        vector_amax = cuda.local.array(n_vectors, u32)
        row_amax = u32(0)  # of row `lane` of the warp's 16
        clear(column_maxima)
        for quad_index in range(WARP_ROWS):
            quad = decode(registers, quad_index)
            if block_2d or columnwise:
                fold(registers, quad_index, quad, column_maxima)
            if quad_index & (quads_of_row - 1) == 0:
                take(registers, quad_index, quad, vector_maxima)
            else:
                fold(registers, quad_index, quad, vector_maxima)
            if row_scales_from_warp:
                amax_bits = warp_max(largest_of(vector_maxima))
                row_amax = amax_bits if lane == quad_index else row_amax
            vector_amax[quad_index // quads_of_row] = largest_of(vector_maxima)

        packed = cuda.local.array(WARP_ROWS, u32)
        overflows = u32(0)
        if block_2d:
            amax = from_bits(block_max(largest_of(column_maxima), smem + amax_smem, thread))
            factor = amax_to_scale(amax, fp8_max, power_2, epsilon)
            if thread == 0:
                if rowwise:
                    store_f32(
                        out_scale_inv + (block_row * out_scale_inv_stride + block_column) * 4, divide(_ONE, factor)
                    )
                if columnwise:
                    store_f32(
                        out_t_scale_inv + (block_column * out_t_scale_inv_stride + block_row) * 4, divide(_ONE, factor)
                    )
            for quad_index in range(WARP_ROWS):
                packed[quad_index], num_overflows = cast(decode(registers, quad_index), factor, factor, factor, factor)
                overflows += num_overflows
            if rowwise:
                store_rows(packed, out, out_stride, row, rows, column, full_tile)
        else:
            if rowwise:
                scale, factor = _ONE, _ONE
                if row_scales_from_warp:
                    scale = amax_to_scale(from_bits(row_amax), fp8_max, power_2, epsilon)
                    if lane < WARP_ROWS and row + lane < rows:
                        scale_offset = block_column * out_scale_inv_stride + i64(row + lane)
                        store_f32(out_scale_inv + scale_offset * 4, divide(_ONE, scale))
                if microscaled:
                    # The lanes that share a block of 32 columns compute the scales of their rows, two each.
                    reduce_scatter(vector_amax, lane)
                    scale_row = i32(2 * quads_of_row * (lane & (lanes_of_block - 1)))
                    scale_address = out_scale_inv + i64(column >> 5) * out_scale_inv_stride + i64(row + scale_row)
                    for index in range(2):
                        code = e8m0_code(from_bits(vector_amax[index]), reciprocal_max)
                        vector_amax[index] = magnitude(e8m0_scale(code))
                        if i32(row + scale_row + quads_of_row * index) < rows and i32(column & -32) < columns:
                            store_1(scale_address + i64(quads_of_row * index), code)
                for quad_index in range(WARP_ROWS):
                    quad = decode(registers, quad_index)
                    if microscaled and quad_index & (quads_of_row - 1) == 0:
                        vector = quad_index // quads_of_row
                        owner = i32((lane & (32 - lanes_of_block)) + (vector >> 1))
                        factor = from_bits(shuffle(vector_amax[vector & 1], owner))
                    elif row_scales_from_warp:
                        factor = from_bits(shuffle(magnitude(scale), row_of(lane, quad_index)))
                    packed[quad_index], num_overflows = cast(quad, factor, factor, factor, factor)
                    overflows += num_overflows
                store_rows(packed, out, out_stride, row, rows, column, full_tile)
            if columnwise:
                p, q, r, s = columns_of(column_maxima)
                shared_store_16(smem + amax_smem + (warp * TILE + 4 * lane) * 4, p, q, r, s)
                cuda.syncthreads()
                if microscaled:
                    for half in range(2):
                        index = thread + THREADS * half
                        group = index >> 7
                        col_in_tile = index & 127
                        amax_address = smem + amax_smem + (2 * group * TILE + col_in_tile) * 4
                        amax_bits = unsigned_max(shared_load_4(amax_address), shared_load_4(amax_address + 4 * TILE))
                        code = e8m0_code(from_bits(amax_bits), reciprocal_max)
                        shared_store_4(smem + scale_smem + index * 4, magnitude(e8m0_scale(code)))
                        if first_column + col_in_tile < columns and first_row + 32 * group < rows:
                            scale_offset = (block_row * 4 + i64(group)) * out_t_scale_inv_stride + i64(
                                first_column + col_in_tile
                            )
                            store_1(out_t_scale_inv + scale_offset, code)
                elif thread < TILE:
                    amax_bits = u32(0)
                    for other_warp in range(WARPS):
                        amax_bits = unsigned_max(
                            amax_bits, shared_load_4(smem + amax_smem + (other_warp * TILE + thread) * 4)
                        )
                    scale = amax_to_scale(from_bits(amax_bits), fp8_max, power_2, epsilon)
                    shared_store_4(smem + scale_smem + thread * 4, magnitude(scale))
                    if first_column + thread < columns:
                        scale_offset = block_row * out_t_scale_inv_stride + i64(first_column + thread)
                        store_f32(out_t_scale_inv + scale_offset * 4, divide(_ONE, scale))
                cuda.syncthreads()
                group = warp >> 1 if microscaled else 0
                scales = shared_load_16(smem + scale_smem + (group * TILE + 4 * lane) * 4)
                e, f, g, h = from_bits(scales[0]), from_bits(scales[1]), from_bits(scales[2]), from_bits(scales[3])
                for quad_index in range(WARP_ROWS):
                    packed[quad_index], num_overflows = cast_columns(decode(registers, quad_index), e, f, g, h)
                    overflows += num_overflows
        if columnwise:
            store_transposed(packed, smem, thread, out_t, out_t_stride, first_row, first_column, columns)
        if count:
            add_overflow_counts(counts, overflows, lane)

    name = f"quantize_blocks({loader.name}, {fp8}, {layout}, {rowwise=}, {columnwise=}, {count=})"
    parameters = {
        "x": loader.args_type,
        **typed(i64, "counts out out_scale_inv out_t out_t_scale_inv"),
        **typed(i32, "rows columns power_2"),
        "epsilon": f32,
        **typed(i64, "out_stride out_scale_inv_stride out_t_stride out_t_scale_inv_stride"),
    }
    shared_bytes = TRANSPOSED_BYTES + WARPS * TILE * 4 + 4 * TILE * 4
    blocks = min_blocks_per_sm(loader, count, 1 if block_2d else rowwise + columnwise)
    return Kernel(name, quantize_blocks, parameters, THREADS, shared_bytes=shared_bytes, min_blocks_per_sm=blocks)
