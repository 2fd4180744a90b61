"""Casts to FP8, rowwise and transposed, from one read, with a scale per block; otherwise like ``quantize.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.casts.quantize import min_blocks_per_sm, scaled_cast
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

Block = tuple[int | None, int | None]
"""Rows and columns of a block that shares a scale; None: all of them."""

BLOCKS: tuple[Block, ...] = ((1, 32), (1, 64), (1, TILE), (TILE, TILE))
"""Supported blocks: parts of a tile's row, whose scales may be E8M0; a tile's rows; whole tiles."""


def takes_octets(block: Block) -> bool:
    """Whether a lane may hold 8 columns of every other row; not if a warp computes the scales of rows one by one."""
    return block != (1, TILE)


def _exchange(values: int, distance: int) -> Any:
    """A device function ``(maxima, lane)`` by which two lanes ``distance`` apart reduce ``values`` maxima.

    Each lane keeps half of the results, the upper lane the upper half.
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


def _reduce_scatter_max(values: int, lanes: int) -> Any:
    """A device function ``(maxima, lane)`` that reduces ``values`` maxima over ``lanes`` consecutive lanes.

    Each lane ends with its share of the results, in order, at the start of ``maxima``.
    """
    first = _exchange(values, lanes // 2)
    if lanes == 2:
        return first
    rest = _reduce_scatter_max(values // 2, lanes // 2)

    @device
    def reduce_scatter(maxima, lane):
        first(maxima, lane)
        rest(maxima, lane)

    return reduce_scatter


def _block_scale(fp8: str, e8m0: bool) -> tuple[Any, Any]:
    """Device functions that compute and store the scale of a part of a row, in E8M0 or float32.

    Returns:
        ``(amax_bits, power_2, epsilon) -> code, scale``, where ``scale`` is to multiply by and ``code`` is E8M0; and
        ``(address, code, scale)``, which stores the inverse scale.
    """
    fp8_max = FP8_MAX[fp8]
    reciprocal_max = _ONE / fp8_max

    @device
    def e8m0_block_scale(amax_bits, power_2, epsilon):
        code = e8m0_code(from_bits(amax_bits), reciprocal_max)
        return code, e8m0_scale(code)

    @device
    def float32_block_scale(amax_bits, power_2, epsilon):
        return u32(0), amax_to_scale(from_bits(amax_bits), fp8_max, power_2, epsilon)

    if e8m0:
        return e8m0_block_scale, device(lambda address, code, scale: store_1(address, code))
    return float32_block_scale, device(lambda address, code, scale: store_f32(address, divide(_ONE, scale)))


@cache
def quantize_blocks_kernel(
    loader: TileLoader, fp8: str, block: Block, e8m0: bool, rowwise: bool, columnwise: bool
) -> Kernel:
    """One scale per ``block``, one of :data:`BLOCKS`, from the block itself; E8M0 if ``e8m0``, else float32.

    ``out_scale_inv`` is ``[blocks of a row, out_scale_inv_stride]``, contiguous along rows, as a GEMM reads it, and so
    that consecutive threads write consecutive scales; ``out_t_scale_inv`` likewise along columns. The scales of whole
    tiles are ``[block rows, block columns]``, and transposed in ``out_t_scale_inv``.

    Raises:
        KernelError: If the block, its scales, or the loader for it are not supported.
    """
    block_rows, block_columns = block
    scales = f"{block_rows}x{block_columns}{' e8m0' * e8m0}"
    if block not in BLOCKS or not block_rows or not block_columns or (e8m0 and block != (1, 32)):
        has = ", ".join(f"{rows}x{columns}" for rows, columns in BLOCKS)
        raise KernelError(f"scales of {scales} are not supported; blocks are {has}, and 1x32 with e8m0")
    if loader.vector > 4 and not takes_octets(block):
        raise KernelError(f"scales of {scales} are not supported with {loader.name}; a lane has to hold 4 columns")
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile = loader.load_tile()
    row_of = row_of_quad(loader.vector)
    store_rows = row_storer(loader.vector)
    n_maxima, clear, take, fold = maxima.num_registers, maxima.clear, maxima.take, maxima.fold
    largest_of_columns, largest_of = maxima.largest_of_columns, maxima.largest
    cast, fp8_max = scaled_cast(fp8), FP8_MAX[fp8]
    block_2d = block_rows > 1
    in_parts = block_columns < TILE  # several blocks per row of a tile share a warp
    row_scales_from_warp = rowwise and not block_2d and not in_parts
    quads_of_row = loader.vector // 4
    lanes_of_block = block_columns // loader.vector
    n_vectors = WARP_ROWS // quads_of_row
    scales_of_lane = max(n_vectors // lanes_of_block, 1)
    log2_scales_of_lane, log2_block_columns = scales_of_lane.bit_length() - 1, block_columns.bit_length() - 1
    parts = TILE // block_columns
    warps_of_part = WARPS // parts
    log2_warps_of_part = warps_of_part.bit_length() - 1
    scale_bytes = 1 if e8m0 else 4
    reduce_scatter = _reduce_scatter_max(n_vectors, lanes_of_block)
    block_scale, store_scale = _block_scale(fp8, e8m0)
    own, _ = loader.own
    amax_smem = TRANSPOSED_BYTES
    scale_smem = TRANSPOSED_BYTES + WARPS * TILE * 4

    def quantize_blocks(
        loader_args, out, out_scale_inv, out_t, out_t_scale_inv,
        rows, columns, power_2, epsilon, out_stride, out_scale_inv_stride, out_t_stride, out_t_scale_inv_stride,
    ):  # fmt: skip
        out, out_scale_inv, out_t, out_t_scale_inv = own(out), own(out_scale_inv), own(out_t), own(out_t_scale_inv)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        smem = dynamic_shared()
        registers = cuda.local.array(num_registers, u32)
        tile_row, tile_col, first_row, column, full_tile = load_tile(
            loader_args, cuda.blockIdx.x, rows, columns, registers
        )
        block_row, block_column = i64(tile_row >> i32(7)), i64(tile_col >> i32(7))

        # Decode quads once for everything that is needed before the cast.
        vector_maxima, column_maxima = cuda.local.array(n_maxima, u32), cuda.local.array(n_maxima, u32)
        vector_amax = cuda.local.array(n_vectors, u32)
        lane_scales = cuda.local.array(scales_of_lane, u32)  # bits of the scales that this lane computes for its block
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
        if block_2d:
            amax = from_bits(block_max(largest_of(column_maxima), smem + amax_smem, thread))
            scale = amax_to_scale(amax, fp8_max, power_2, epsilon)
            if thread == 0:
                if rowwise:
                    store_f32(
                        out_scale_inv + (block_row * out_scale_inv_stride + block_column) * 4, divide(_ONE, scale)
                    )
                if columnwise:
                    store_f32(
                        out_t_scale_inv + (block_column * out_t_scale_inv_stride + block_row) * 4, divide(_ONE, scale)
                    )
            for quad_index in range(WARP_ROWS):
                packed[quad_index] = cast(decode(registers, quad_index), scale, scale, scale, scale)
            if rowwise:
                store_rows(packed, out, out_stride, first_row, rows, column, full_tile)
        else:
            if rowwise:
                row_scale, scale = _ONE, _ONE  # of row `lane` of the warp's 16; of the current quad
                if row_scales_from_warp:
                    row_scale = amax_to_scale(from_bits(row_amax), fp8_max, power_2, epsilon)
                    if lane < WARP_ROWS and first_row + lane < rows:
                        scale_offset = block_column * out_scale_inv_stride + i64(first_row + lane)
                        store_f32(out_scale_inv + scale_offset * 4, divide(_ONE, row_scale))
                if in_parts:
                    # The lanes that share a block compute the scales of its rows, one or two each.
                    reduce_scatter(vector_amax, lane)
                    scale_row = i32(scales_of_lane * quads_of_row * (lane & (lanes_of_block - 1)))
                    scale_offset = i64(column >> log2_block_columns) * out_scale_inv_stride + i64(first_row + scale_row)
                    scale_address = out_scale_inv + scale_offset * scale_bytes
                    for index in range(scales_of_lane):
                        code, scale = block_scale(vector_amax[index], power_2, epsilon)
                        lane_scales[index] = magnitude(scale)
                        scaled_row = i32(first_row + scale_row + quads_of_row * index)
                        if scaled_row < rows and i32(column & -block_columns) < columns:
                            store_scale(scale_address + i64(scale_bytes * quads_of_row * index), code, scale)
                for quad_index in range(WARP_ROWS):
                    quad = decode(registers, quad_index)
                    if in_parts and quad_index & (quads_of_row - 1) == 0:
                        vector = quad_index // quads_of_row
                        owner = i32((lane & (32 - lanes_of_block)) + (vector >> log2_scales_of_lane))
                        scale = from_bits(shuffle(lane_scales[vector & (scales_of_lane - 1)], owner))
                    elif row_scales_from_warp:
                        scale = from_bits(shuffle(magnitude(row_scale), row_of(lane, quad_index)))
                    packed[quad_index] = cast(quad, scale, scale, scale, scale)
                store_rows(packed, out, out_stride, first_row, rows, column, full_tile)
            if columnwise:
                max_0, max_1, max_2, max_3 = largest_of_columns(column_maxima)
                shared_store_16(smem + amax_smem + (warp * TILE + 4 * lane) * 4, max_0, max_1, max_2, max_3)
                cuda.syncthreads()
                if in_parts:
                    for step in range(parts * TILE // THREADS):
                        index = thread + THREADS * step
                        part = index >> 7
                        col_in_tile = index & 127
                        amax_address = smem + amax_smem + (warps_of_part * part * TILE + col_in_tile) * 4
                        amax_bits = shared_load_4(amax_address)
                        for other_warp in range(1, warps_of_part):
                            amax_bits = unsigned_max(amax_bits, shared_load_4(amax_address + 4 * TILE * other_warp))
                        code, scale = block_scale(amax_bits, power_2, epsilon)
                        shared_store_4(smem + scale_smem + index * 4, magnitude(scale))
                        if tile_col + col_in_tile < columns and tile_row + block_columns * part < rows:
                            scale_offset = (block_row * parts + i64(part)) * out_t_scale_inv_stride + i64(
                                tile_col + col_in_tile
                            )
                            store_scale(out_t_scale_inv + scale_offset * scale_bytes, code, scale)
                elif thread < TILE:
                    amax_bits = u32(0)
                    for other_warp in range(WARPS):
                        amax_bits = unsigned_max(
                            amax_bits, shared_load_4(smem + amax_smem + (other_warp * TILE + thread) * 4)
                        )
                    scale = amax_to_scale(from_bits(amax_bits), fp8_max, power_2, epsilon)
                    shared_store_4(smem + scale_smem + thread * 4, magnitude(scale))
                    if tile_col + thread < columns:
                        scale_offset = block_row * out_t_scale_inv_stride + i64(tile_col + thread)
                        store_f32(out_t_scale_inv + scale_offset * 4, divide(_ONE, scale))
                cuda.syncthreads()
                part = warp >> log2_warps_of_part if in_parts else 0
                words = shared_load_16(smem + scale_smem + (part * TILE + 4 * lane) * 4)
                e, f, g, h = from_bits(words[0]), from_bits(words[1]), from_bits(words[2]), from_bits(words[3])
                for quad_index in range(WARP_ROWS):
                    packed[quad_index] = cast(decode(registers, quad_index), e, f, g, h)
        if columnwise:
            store_transposed(packed, smem, thread, out_t, out_t_stride, tile_row, tile_col, columns)

    name = f"quantize_blocks({loader.name}, {fp8}, {scales}, {rowwise=}, {columnwise=})"
    parameters = {
        "loader_args": loader.args_type,
        **typed(loader.address_type, "out out_scale_inv out_t out_t_scale_inv"),
        **typed(i32, "rows columns power_2"),
        "epsilon": f32,
        **typed(i64, "out_stride out_scale_inv_stride out_t_stride out_t_scale_inv_stride"),
    }
    shared_bytes = TRANSPOSED_BYTES + WARPS * TILE * 4 + 4 * TILE * 4
    blocks = min_blocks_per_sm(loader, 1 if block_2d else rowwise + columnwise)
    return Kernel(name, quantize_blocks, parameters, THREADS, shared_bytes=shared_bytes, min_blocks_per_sm=blocks)
