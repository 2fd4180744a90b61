"""Tensors to FP8 with a scale for each block, row by row and transposed, from one read; else as ``quantize.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import FP8_MAX, amax_to_scale, e8m0_code, e8m0_scale, magnitude
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.overflow import STRIDES, add_overflow_counts, min_blocks_per_sm, overflow_counter
from cuda_kernels.device.ptx import (
    divide,
    dynamic_shared,
    float8x4,
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
    Source,
    block_max,
    position,
    row_of_quad,
    row_storer,
    share,
    store_transposed,
)
from cuda_kernels.kernel import Kernel

_ONE, _ZERO = np.float32(1), np.float32(0)


def _exchange(values: int, distance: int) -> Any:
    """A device function ``(maxima, lane)`` between lanes that are ``distance`` apart: each keeps half of ``values``.

    Those of the upper lane are the upper half.
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


def _spread_maxima(lanes: int) -> Any:
    """A device function ``(maxima, lane)`` of ``2 * lanes`` maxima that ``lanes`` neighbouring lanes have of their own.

    Then lane n of them has the common maxima number 2 n and 2 n + 1, as its first two.
    """
    first = _exchange(2 * lanes, lanes // 2)
    second, third = _exchange(lanes, lanes // 4), _exchange(4, 1)

    @device
    def of_4(maxima, lane):
        first(maxima, lane)
        second(maxima, lane)

    @device
    def of_8(maxima, lane):
        first(maxima, lane)
        second(maxima, lane)
        third(maxima, lane)

    return of_4 if lanes == 4 else of_8


@cache
def quantize_blocks_kernel(
    source: Source, fp8: str, layout: str, rowwise: bool, columnwise: bool, count: bool
) -> Kernel:
    """One scale for each block of ``layout`` (``"1x128"``, ``"128x128"``, ``"1x32"``), from the block itself.

    Scales of ``out`` lie with the rows side by side, ``[blocks of a row, out_scale_stride]``, those of ``out_t``
    likewise with the columns: neighbouring threads write neighbours, and a GEMM reads them so. Those of ``"128x128"``
    lie as the blocks do, in ``out_t_scale`` transposed.
    """
    load, decode, maxima, num_registers = source.load, source.decode, source.maxima, source.num_registers
    share_of = share(source.vector)
    row_of = row_of_quad(source.vector)
    store_rows = row_storer(source.vector)
    n_kept, clear, take, fold = maxima.num_registers, maxima.clear, maxima.take, maxima.fold
    columns_of, largest_of = maxima.columns, maxima.largest
    pack = float8x4[fp8]
    fp8_max = FP8_MAX[fp8]
    count_overflows = overflow_counter(fp8)
    reciprocal_max = _ONE / fp8_max
    square = layout == "128x128"
    microscaled = layout == "1x32"
    rows_share = rowwise and layout == "1x128"
    quads_of_row = source.vector // 4
    lanes_of_32 = 32 // source.vector
    n_vectors = WARP_ROWS // quads_of_row
    spread_maxima = _spread_maxima(lanes_of_32)
    exchange = TRANSPOSED_BYTES
    column_scales = TRANSPOSED_BYTES + WARPS * TILE * 4

    def quantize_blocks(
        x, counts, out, out_scale, out_t, out_t_scale,
        rows, columns, power_2, epsilon, out_stride, out_scale_stride, out_t_stride, out_t_scale_stride,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        shared = dynamic_shared()
        first_row, first_column, whole = position(cuda.blockIdx.x, rows, columns)
        block_row, block_column = i64(first_row >> i32(7)), i64(first_column >> i32(7))
        row, column = share_of(thread)
        row, column = i32(first_row + row), i32(first_column + column)
        registers = cuda.local.array(num_registers, u32)
        load(x, rows, columns, row, column, whole, registers)

        # Quads are decoded once for what they are needed for before they are cast.
        of_vector, of_columns = cuda.local.array(n_kept, u32), cuda.local.array(n_kept, u32)
        of_vectors = cuda.local.array(n_vectors, u32)
        of_row = u32(0)  # of row `lane` of the warp's 16
        clear(of_columns)
        for step in range(WARP_ROWS):
            quad = decode(registers, step)
            if square or columnwise:
                fold(registers, step, quad, of_columns)
            if step & (quads_of_row - 1) == 0:
                take(registers, step, quad, of_vector)
            else:
                fold(registers, step, quad, of_vector)
            if rows_share:
                largest = warp_max(largest_of(of_vector))
                of_row = largest if lane == step else of_row
            of_vectors[step // quads_of_row] = largest_of(of_vector)

        packed = cuda.local.array(WARP_ROWS, u32)
        overflows = u32(0)
        if square:
            amax = from_bits(block_max(largest_of(of_columns), shared + exchange, thread))
            factor = amax_to_scale(amax, fp8_max, power_2, epsilon)
            if thread == 0:
                if rowwise:
                    store_f32(out_scale + (block_row * out_scale_stride + block_column) * 4, divide(_ONE, factor))
                if columnwise:
                    store_f32(out_t_scale + (block_column * out_t_scale_stride + block_row) * 4, divide(_ONE, factor))
            for step in range(WARP_ROWS):
                a, b, c, d = decode(registers, step)
                packed[step] = pack(a * factor, b * factor, c * factor, d * factor)
                if count:
                    overflows += count_overflows(a, b, c, d, factor, factor, factor, factor)
            if rowwise:
                store_rows(packed, out, out_stride, row, rows, column, whole)
        else:
            if rowwise:
                scale, factor = _ONE, _ONE
                if rows_share:
                    scale = amax_to_scale(from_bits(of_row), fp8_max, power_2, epsilon)
                    if lane < WARP_ROWS and row + lane < rows:
                        place = block_column * out_scale_stride + i64(row + lane)
                        store_f32(out_scale + place * 4, divide(_ONE, scale))
                if microscaled:
                    # Of the rows of a thread each lane of a block's makes the scales of two.
                    spread_maxima(of_vectors, lane)
                    of_lane = i32(2 * quads_of_row * (lane & (lanes_of_32 - 1)))
                    place = out_scale + i64(column >> 5) * out_scale_stride + i64(row + of_lane)
                    for index in range(2):
                        code = e8m0_code(from_bits(of_vectors[index]), reciprocal_max)
                        of_vectors[index] = magnitude(e8m0_scale(code))
                        if i32(row + of_lane + quads_of_row * index) < rows and i32(column & -32) < columns:
                            store_1(place + i64(quads_of_row * index), code)
                for step in range(WARP_ROWS):
                    a, b, c, d = decode(registers, step)
                    if microscaled and step & (quads_of_row - 1) == 0:
                        vector = step // quads_of_row
                        owner = i32((lane & (32 - lanes_of_32)) + (vector >> 1))
                        factor = from_bits(shuffle(of_vectors[vector & 1], owner))
                    elif rows_share:
                        factor = from_bits(shuffle(magnitude(scale), row_of(lane, step)))
                    packed[step] = pack(a * factor, b * factor, c * factor, d * factor)
                    if count:
                        overflows += count_overflows(a, b, c, d, factor, factor, factor, factor)
                store_rows(packed, out, out_stride, row, rows, column, whole)
            if columnwise:
                p, q, r, s = columns_of(of_columns)
                shared_store_16(shared + exchange + (warp * TILE + 4 * lane) * 4, p, q, r, s)
                cuda.syncthreads()
                if microscaled:
                    for half in range(2):
                        index = thread + THREADS * half
                        group = index >> 7
                        of_tile = index & 127
                        at = shared + exchange + (2 * group * TILE + of_tile) * 4
                        largest = unsigned_max(shared_load_4(at), shared_load_4(at + 4 * TILE))
                        code = e8m0_code(from_bits(largest), reciprocal_max)
                        shared_store_4(shared + column_scales + index * 4, magnitude(e8m0_scale(code)))
                        if first_column + of_tile < columns and first_row + 32 * group < rows:
                            place = (block_row * 4 + i64(group)) * out_t_scale_stride + i64(first_column + of_tile)
                            store_1(out_t_scale + place, code)
                elif thread < TILE:
                    largest = u32(0)
                    for other in range(WARPS):
                        largest = unsigned_max(largest, shared_load_4(shared + exchange + (other * TILE + thread) * 4))
                    scale = amax_to_scale(from_bits(largest), fp8_max, power_2, epsilon)
                    shared_store_4(shared + column_scales + thread * 4, magnitude(scale))
                    if first_column + thread < columns:
                        place = block_row * out_t_scale_stride + i64(first_column + thread)
                        store_f32(out_t_scale + place * 4, divide(_ONE, scale))
                cuda.syncthreads()
                group = warp >> 1 if microscaled else 0
                scales = shared_load_16(shared + column_scales + (group * TILE + 4 * lane) * 4)
                e, f, g, h = from_bits(scales[0]), from_bits(scales[1]), from_bits(scales[2]), from_bits(scales[3])
                for step in range(WARP_ROWS):
                    a, b, c, d = decode(registers, step)
                    packed[step] = pack(a * e, b * f, c * g, d * h)
                    if count and not rowwise:
                        overflows += count_overflows(a, b, c, d, e, f, g, h)
        if columnwise:
            store_transposed(packed, shared, thread, out_t, out_t_stride, first_row, first_column, columns)
        if count:
            add_overflow_counts(counts, overflows, lane)

    return Kernel(
        f"quantize_blocks({source.name}, {fp8}, {layout}, {rowwise=}, {columnwise=}, {count=})",
        quantize_blocks,
        (source.args_type, *[i64] * 5, i32, i32, i32, f32, *STRIDES),
        THREADS,
        shared_bytes=TRANSPOSED_BYTES + WARPS * TILE * 4 + 4 * TILE * 4,
        blocks_per_multiprocessor=min_blocks_per_sm(source, count, 1 if square else rowwise + columnwise),
    )
