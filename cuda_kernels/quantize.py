"""Tensors to FP8, row by row and transposed, from one read; scaled as a whole, by rows, or by blocks.

Both kernels work on the tiles of ``tile.py``. ``out [rows, columns]`` and ``out_t [columns, rows]`` have pitches that
are multiples of 16 bytes; the padding is written with zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from cuda_kernels.codec import (
    FP8_MAX,
    current_scale,
    device,
    e8m0_code,
    e8m0_scale,
    largest_of,
    magnitude,
    quad_magnitude,
)
from cuda_kernels.launch import Kernel
from cuda_kernels.ptx import (
    atomic_add,
    atomic_max,
    divide,
    dynamic_shared,
    f32,
    float8x4,
    from_bits,
    i32,
    i64,
    load_4,
    load_f32,
    load_relaxed,
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
    warp_sum,
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
_SMALLEST = {"e4m3": np.float32(2.0**-9), "e5m2": np.float32(2.0**-16)}


def _counters(fp8: str) -> Any:
    """A device function that counts, of four products before their cast, those beyond the format at either end."""
    largest, half_smallest = FP8_MAX[fp8], _SMALLEST[fp8] / np.float32(2)

    @device
    def lost(value, scale):
        product = abs(value * scale)
        saturated = u32(1) if product > largest else u32(0)
        # Half of the smallest is a tie, which rounds to zero.
        flushed = u32(0x10000) if product <= half_smallest and value != _ZERO else u32(0)
        return saturated + flushed

    return lost


def _fitting(source: Source, count: bool, casts: int = 1) -> int:
    """How many blocks fit into a multiprocessor: a second cast keeps the float32 of the first in registers."""
    return max(1, source.blocks - int(count) - (casts - 1))


@cache
def amax_kernel(source: Source, accumulate: bool) -> Kernel:
    """``max |x|`` of a tensor, by blocks that each take every n-th tile.

    ``accumulate``: the maximum raises ``amax [1]``. Otherwise ``amax [blocks]`` gets one for each block, and nothing
    happens where ``scale [1]`` (if it is given) is not 0.
    """
    load, decode, held = source.load, source.decode, source.registers

    def amax(x, rows, columns, scale, amax):
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
        (*source.parameters, i64, i64),
        THREADS,
        shared_bytes=32,
        blocks_per_multiprocessor=source.blocks,
    )


@cache
def row_amax_kernel(source: Source, by_row: bool, by_column: bool) -> Kernel:
    """``max |x|`` of each row and each column, raised in ``rows_amax [rows]`` and ``columns_amax [columns]``."""
    load, decode, held = source.load, source.decode, source.registers

    def row_amax(x, rows, columns, rows_amax, columns_amax):
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
        (*source.parameters, i64, i64),
        THREADS,
        shared_bytes=WARPS * TILE * 4,
        blocks_per_multiprocessor=max(1, source.blocks - 1),
    )


_OUTPUTS = (i64, i64, i64, i64, i64, i64, i64, i64)
"""For the rowwise and the transposed copy: codes, their pitch, scale_inv, its pitch."""


@cache
def quantize_tensor_kernel(
    source: Source, fp8: str, rowwise: bool, columnwise: bool, observe: bool, count: bool
) -> Kernel:
    """One scale for the tensor: ``scale [1]`` if it is given and not 0, else from the maximum of ``own [n_own]``.

    ``observe`` raises ``seen [1]`` to the tensor's amax; ``count`` adds the numbers of saturated values and of those
    flushed to zero to the int64 ``counts [2]``.
    """
    load, decode, held = source.load, source.decode, source.registers
    pack, largest_code, lost = float8x4[fp8], FP8_MAX[fp8], _counters(fp8)

    def quantize_tensor(
        x, rows, columns, scale, own, n_own, power_2, epsilon, seen, counts,
        out, out_pitch, out_scale, out_scale_pitch, out_t, out_t_pitch, out_t_scale, out_t_scale_pitch,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        shared = dynamic_shared()
        first_row, first_column = position(cuda.blockIdx.x, columns)
        row, column = first_row + WARP_ROWS * warp, first_column + 4 * lane
        registers = cuda.local.array(held, u32)
        load(x, rows, columns, row, column, registers)

        factor = _ZERO
        if scale != 0:
            factor = load_f32(scale)
        if factor == _ZERO:
            largest = u32(0)
            index = thread
            while index < n_own:
                largest = unsigned_max(largest, load_4(own + i64(index) * 4))
                index += THREADS
            amax = from_bits(block_max(largest, shared + TRANSPOSED_BYTES, thread))
            factor = current_scale(amax, largest_code, power_2, epsilon)
        if cuda.blockIdx.x == 0 and thread == 0:
            if rowwise:
                store_f32(out_scale, divide(_ONE, factor))
            if columnwise:
                store_f32(out_t_scale, divide(_ONE, factor))

        words = cuda.local.array(WARP_ROWS, u32)
        largest, losses = u32(0), u32(0)
        for step in range(WARP_ROWS):
            a, b, c, d = decode(registers, step)
            words[step] = pack(a * factor, b * factor, c * factor, d * factor)
            if observe:
                largest = unsigned_max(largest, quad_magnitude(a, b, c, d))
            if count:
                losses += lost(a, factor) + lost(b, factor) + lost(c, factor) + lost(d, factor)
            if rowwise:
                store_row(out, out_pitch, row + step, rows, column, words[step])
        if count:
            saturated, flushed = warp_sum(losses & u32(0xFFFF)), warp_sum(losses >> u32(16))
            if lane == 0:
                atomic_add(counts, i64(saturated))
                atomic_add(counts + 8, i64(flushed))
        if observe:
            largest = block_max(largest, shared + TRANSPOSED_BYTES + 32, thread)
            # Most tiles raise nothing: a read is cheaper than an atomic operation on one address.
            if thread == 0 and largest > load_relaxed(seen):
                atomic_max(seen, largest)
        if columnwise:
            store_transposed(words, shared, thread, out_t, out_t_pitch, first_row, first_column, columns)

    return Kernel(
        f"quantize_tensor({source.name}, {fp8}, {rowwise=}, {columnwise=}, {observe=}, {count=})",
        quantize_tensor,
        (*source.parameters, i64, i64, i32, i32, f32, i64, i64, *_OUTPUTS),
        THREADS,
        shared_bytes=TRANSPOSED_BYTES + 64,
        blocks_per_multiprocessor=_fitting(source, count),
    )


@cache
def quantize_rows_kernel(source: Source, fp8: str, rowwise: bool, columnwise: bool, count: bool) -> Kernel:
    """One scale for each row, and for the transposed copy one for each column, from their amaxes."""
    load, decode, held = source.load, source.decode, source.registers
    pack, largest_code, lost = float8x4[fp8], FP8_MAX[fp8], _counters(fp8)

    def quantize_rows(
        x, rows, columns, rows_amax, columns_amax, power_2, epsilon, counts,
        out, out_pitch, out_scale, out_scale_pitch, out_t, out_t_pitch, out_t_scale, out_t_scale_pitch,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        first_row, first_column = position(cuda.blockIdx.x, columns)
        row, column = first_row + WARP_ROWS * warp, first_column + 4 * lane
        registers = cuda.local.array(held, u32)
        load(x, rows, columns, row, column, registers)
        words = cuda.local.array(WARP_ROWS, u32)
        losses = u32(0)
        if rowwise:
            scale = _ONE  # of row `lane` of the warp's 16
            if lane < WARP_ROWS and row + lane < rows:
                scale = current_scale(load_f32(rows_amax + i64(row + lane) * 4), largest_code, power_2, epsilon)
                if first_column == 0:
                    store_f32(out_scale + i64(row + lane) * 4, divide(_ONE, scale))
            for step in range(WARP_ROWS):
                a, b, c, d = decode(registers, step)
                factor = from_bits(shuffle(magnitude(scale), step))
                store_row(
                    out, out_pitch, row + step, rows, column, pack(a * factor, b * factor, c * factor, d * factor)
                )
                if count:
                    losses += lost(a, factor) + lost(b, factor) + lost(c, factor) + lost(d, factor)
        if columnwise:
            scales = cuda.local.array(4, f32)
            for index in range(4):
                scales[index] = _ONE
                if column + index < columns:
                    amax = load_f32(columns_amax + i64(column + index) * 4)
                    scales[index] = current_scale(amax, largest_code, power_2, epsilon)
                    if first_row == 0 and warp == 0:
                        store_f32(out_t_scale + i64(column + index) * 4, divide(_ONE, scales[index]))
            for step in range(WARP_ROWS):
                a, b, c, d = decode(registers, step)
                words[step] = pack(a * scales[0], b * scales[1], c * scales[2], d * scales[3])
                if count and not rowwise:
                    losses += lost(a, scales[0]) + lost(b, scales[1]) + lost(c, scales[2]) + lost(d, scales[3])
            store_transposed(words, dynamic_shared(), thread, out_t, out_t_pitch, first_row, first_column, columns)
        if count:
            saturated, flushed = warp_sum(losses & u32(0xFFFF)), warp_sum(losses >> u32(16))
            if lane == 0:
                atomic_add(counts, i64(saturated))
                atomic_add(counts + 8, i64(flushed))

    return Kernel(
        f"quantize_rows({source.name}, {fp8}, {rowwise=}, {columnwise=}, {count=})",
        quantize_rows,
        (*source.parameters, i64, i64, i32, f32, i64, *_OUTPUTS),
        THREADS,
        shared_bytes=TRANSPOSED_BYTES,
        blocks_per_multiprocessor=_fitting(source, count, rowwise + columnwise),
    )


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
    pack, largest_code, lost = float8x4[fp8], FP8_MAX[fp8], _counters(fp8)
    reciprocal_max = _ONE / largest_code
    square, microscaled = layout == "128x128", layout == "1x32"
    rows_share = rowwise and layout == "1x128"
    exchange, column_scales = TRANSPOSED_BYTES, TRANSPOSED_BYTES + WARPS * TILE * 4

    def quantize_blocks(
        x, rows, columns, power_2, epsilon, counts,
        out, out_pitch, out_scale, out_scale_pitch, out_t, out_t_pitch, out_t_scale, out_t_scale_pitch,
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
                    losses += lost(a, factor) + lost(b, factor) + lost(c, factor) + lost(d, factor)
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
                        losses += lost(a, factor) + lost(b, factor) + lost(c, factor) + lost(d, factor)
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
                        losses += lost(a, p) + lost(b, q) + lost(c, r) + lost(d, s)
        if columnwise:
            store_transposed(words, shared, thread, out_t, out_t_pitch, first_row, first_column, columns)
        if count:
            saturated, flushed = warp_sum(losses & u32(0xFFFF)), warp_sum(losses >> u32(16))
            if lane == 0:
                atomic_add(counts, i64(saturated))
                atomic_add(counts + 8, i64(flushed))

    return Kernel(
        f"quantize_blocks({source.name}, {fp8}, {layout}, {rowwise=}, {columnwise=}, {count=})",
        quantize_blocks,
        (*source.parameters, i32, f32, i64, *_OUTPUTS),
        THREADS,
        shared_bytes=TRANSPOSED_BYTES + WARPS * TILE * 4 + 4 * TILE * 4,
        blocks_per_multiprocessor=_fitting(source, count, 1 if square else rowwise + columnwise),
    )
