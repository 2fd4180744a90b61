"""Tensors to FP8 with a scale for each block, row by row and transposed, from one read; else as ``quantize.py``."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from cuda_kernels.codec import (
    FP8_MAX,
    current_scale,
    e8m0_code,
    e8m0_scale,
    largest_of,
    magnitude,
    quad_magnitude,
)
from cuda_kernels.launch import Kernel
from cuda_kernels.losses import PITCHES, add_losses, fitting, losses_of
from cuda_kernels.ptx import (
    divide,
    dynamic_shared,
    f32,
    float8x4,
    from_bits,
    i32,
    i64,
    shared_load_4,
    shared_load_16,
    shared_store_4,
    shared_store_16,
    shuffle,
    shuffle_xor,
    store_1,
    store_f32,
    u32,
    unsigned_max,
    warp_max,
)
from cuda_kernels.tile import (
    THREADS,
    TILE,
    TRANSPOSED_BYTES,
    WARP_ROWS,
    WARPS,
    Source,
    block_max,
    position,
    store_row,
    store_transposed,
)

_ONE, _ZERO = np.float32(1), np.float32(0)


@cache
def quantize_blocks_kernel(
    source: Source, fp8: str, layout: str, rowwise: bool, columnwise: bool, count: bool
) -> Kernel:
    """One scale for each block of ``layout`` (``"1x128"``, ``"128x128"``, ``"1x32"``), from the block itself.

    Scales of ``out`` lie with the rows side by side, ``[blocks of a row, out_scale_pitch]``, those of ``out_t``
    likewise with the columns: neighbouring threads write neighbours, and a GEMM reads them so. Those of ``"128x128"``
    lie as the blocks do, in ``out_t_scale`` transposed.
    """
    load, decode, held = source.load, source.decode, source.registers
    pack, largest_code, lost = float8x4[fp8], FP8_MAX[fp8], losses_of(fp8)
    reciprocal_max = _ONE / largest_code
    square, microscaled = layout == "128x128", layout == "1x32"
    rows_share = rowwise and layout == "1x128"
    exchange, column_scales = TRANSPOSED_BYTES, TRANSPOSED_BYTES + WARPS * TILE * 4

    def quantize_blocks(
        x, counts, out, out_scale, out_t, out_t_scale,
        rows, columns, power_2, epsilon, out_pitch, out_scale_pitch, out_t_pitch, out_t_scale_pitch,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        shared = dynamic_shared()
        first_row, first_column = position(cuda.blockIdx.x, columns)
        block_row, block_column = i64(first_row >> i32(7)), i64(first_column >> i32(7))
        row, column = first_row + WARP_ROWS * warp, first_column + 4 * lane
        registers = cuda.local.array(held, u32)
        load(x, rows, columns, row, column, registers)

        of_columns = cuda.local.array(4, u32)
        for index in range(4):
            of_columns[index] = u32(0)
        of_row = u32(0)  # of row `lane` of the warp's 16
        for step in range(WARP_ROWS):
            a, b, c, d = decode(registers, step)
            a, b, c, d = magnitude(a), magnitude(b), magnitude(c), magnitude(d)
            of_columns[0], of_columns[1] = unsigned_max(of_columns[0], a), unsigned_max(of_columns[1], b)
            of_columns[2], of_columns[3] = unsigned_max(of_columns[2], c), unsigned_max(of_columns[3], d)
            if rows_share:
                largest = warp_max(largest_of(a, b, c, d))
                of_row = largest if lane == step else of_row

        words = cuda.local.array(WARP_ROWS, u32)
        losses = u32(0)
        if square:
            largest = largest_of(of_columns[0], of_columns[1], of_columns[2], of_columns[3])
            amax = from_bits(block_max(largest, shared + exchange, thread))
            factor = current_scale(amax, largest_code, power_2, epsilon)
            if thread == 0:
                if rowwise:
                    store_f32(out_scale + (block_row * out_scale_pitch + block_column) * 4, divide(_ONE, factor))
                if columnwise:
                    store_f32(out_t_scale + (block_column * out_t_scale_pitch + block_row) * 4, divide(_ONE, factor))
            for step in range(WARP_ROWS):
                a, b, c, d = decode(registers, step)
                words[step] = pack(a * factor, b * factor, c * factor, d * factor)
                if rowwise:
                    store_row(out, out_pitch, row + step, rows, column, words[step])
                if count:
                    losses += lost(a, b, c, d, factor, factor, factor, factor)
        else:
            if rowwise:
                scale = _ONE
                if rows_share:
                    scale = current_scale(from_bits(of_row), largest_code, power_2, epsilon)
                    if lane < WARP_ROWS and row + lane < rows:
                        place = block_column * out_scale_pitch + i64(row + lane)
                        store_f32(out_scale + place * 4, divide(_ONE, scale))
                for step in range(WARP_ROWS):
                    a, b, c, d = decode(registers, step)
                    if microscaled:
                        largest = quad_magnitude(a, b, c, d)
                        largest = unsigned_max(largest, shuffle_xor(largest, 1))
                        largest = unsigned_max(largest, shuffle_xor(largest, 2))
                        largest = unsigned_max(largest, shuffle_xor(largest, 4))
                        code = e8m0_code(from_bits(largest), reciprocal_max)
                        factor = e8m0_scale(code)
                        if lane & 7 == 0 and row + step < rows and column < columns:
                            place = i64(column >> 5) * out_scale_pitch + i64(row + step)
                            store_1(out_scale + place, code)
                    else:
                        factor = from_bits(shuffle(magnitude(scale), step))
                    word = pack(a * factor, b * factor, c * factor, d * factor)
                    store_row(out, out_pitch, row + step, rows, column, word)
                    if count:
                        losses += lost(a, b, c, d, factor, factor, factor, factor)
            if columnwise:
                shared_store_16(
                    shared + exchange + (warp * TILE + 4 * lane) * 4,
                    of_columns[0], of_columns[1], of_columns[2], of_columns[3],
                )  # fmt: skip
                cuda.syncthreads()
                if microscaled:
                    for half in range(2):
                        index = thread + THREADS * half
                        group, of_tile = index >> 7, index & 127
                        at = shared + exchange + (2 * group * TILE + of_tile) * 4
                        largest = unsigned_max(shared_load_4(at), shared_load_4(at + 4 * TILE))
                        code = e8m0_code(from_bits(largest), reciprocal_max)
                        shared_store_4(shared + column_scales + index * 4, magnitude(e8m0_scale(code)))
                        if first_column + of_tile < columns and first_row + 32 * group < rows:
                            place = (block_row * 4 + i64(group)) * out_t_scale_pitch + i64(first_column + of_tile)
                            store_1(out_t_scale + place, code)
                elif thread < TILE:
                    largest = u32(0)
                    for other in range(WARPS):
                        largest = unsigned_max(largest, shared_load_4(shared + exchange + (other * TILE + thread) * 4))
                    scale = current_scale(from_bits(largest), largest_code, power_2, epsilon)
                    shared_store_4(shared + column_scales + thread * 4, magnitude(scale))
                    if first_column + thread < columns:
                        place = block_row * out_t_scale_pitch + i64(first_column + thread)
                        store_f32(out_t_scale + place * 4, divide(_ONE, scale))
                cuda.syncthreads()
                group = warp >> 1 if microscaled else 0
                scales = shared_load_16(shared + column_scales + (group * TILE + 4 * lane) * 4)
                p, q, r, s = from_bits(scales[0]), from_bits(scales[1]), from_bits(scales[2]), from_bits(scales[3])
                for step in range(WARP_ROWS):
                    a, b, c, d = decode(registers, step)
                    words[step] = pack(a * p, b * q, c * r, d * s)
                    if count and not rowwise:
                        losses += lost(a, b, c, d, p, q, r, s)
        if columnwise:
            store_transposed(words, shared, thread, out_t, out_t_pitch, first_row, first_column, columns)
        if count:
            add_losses(counts, losses, lane)

    return Kernel(
        f"quantize_blocks({source.name}, {fp8}, {layout}, {rowwise=}, {columnwise=}, {count=})",
        quantize_blocks,
        (source.words_type, *[i64] * 5, i32, i32, i32, f32, *PITCHES),
        THREADS,
        shared_bytes=TRANSPOSED_BYTES + WARPS * TILE * 4 + 4 * TILE * 4,
        blocks_per_multiprocessor=fitting(source, count, 1 if square else rowwise + columnwise),
    )
