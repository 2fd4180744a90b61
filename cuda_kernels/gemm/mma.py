"""The product on cards without warpgroup products: warps multiply what cp.async copied, a block for each tile.

All threads of a block copy 128 bytes of each row of A and B at a time to a ring of places in shared memory, all but
one of which are on their way while one is multiplied; scales along K come with them. Chunk ``c`` of 16 bytes of row
``r`` lies at ``c ^ (r mod 8)``, so that the same chunk of eight rows is in different banks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.fragments import (
    add,
    add_rows,
    add_rows_and_columns,
    ldmatrix_x4,
    mma,
    slice_of,
    store_all,
    zeros,
)
from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import dynamic_shared, from_bits, load_f32, quotient, shared_load_4
from cuda_kernels.device.sm80 import cp_async_4, cp_async_16, cp_async_commit, cp_async_wait
from cuda_kernels.gemm.epilogue import finisher
from cuda_kernels.gemm.promotion import scales_of_blocks, steps_at_once
from cuda_kernels.gemm.raster import corner
from cuda_kernels.gemm.spec import WARP_COLUMNS, MmaTile, Product, Scaling
from cuda_kernels.kernel import Kernel

_K = 128
"""Bytes of a row in shared memory, and the products of one scale."""


@cache
def mma_gemm_kernel(product: Product, tile: MmaTile) -> Kernel:
    """``out [m, n]``, a block for each tile; see :class:`Product` and :class:`MmaTile`.

    Parameters are address and pitch of A, B, A's scales and B's, the addresses of bias and of the largest magnitude
    seen, address and pitch of out; then m, n and k. Pitches are in elements. Addresses and pitches of A and B are
    multiples of 16. Scales of 1x128 have rows side by side, those of 128x128 the blocks of a row. What there is none of
    is 0.
    """
    scaling, promote = product.scaling, product.promote
    rows, columns, threads, strips, stages = tile.rows, tile.columns, tile.threads, tile.strips, tile.stages
    along_k = scaling.along_k
    by_row = scaling is Scaling.ROW
    by_block = scaling is Scaling.BLOCK
    by_blocks = scaling is Scaling.BLOCKS
    stage_bytes = tile.stage_bytes(scaling)
    ahead = stages - 1
    pending = stages - 2
    at_b = rows * _K
    at_scale_a = at_b + columns * _K
    at_scale_b = at_scale_a + 4 * rows
    parts = WARP_COLUMNS // 8
    count = strips * WARP_COLUMNS // 2
    zero = zeros(count)
    plus = add(count)
    multiply = mma(strips, parts, product.a, product.b)
    load_a, load_b = ldmatrix_x4(strips, 16 * _K), ldmatrix_x4(parts // 2, 16 * _K)
    plus_scaled = _adder(product, strips)
    leave = _leaver(product, strips, tile.even)
    load_blocks, block_of = scales_of_blocks(WARP_COLUMNS)
    window = steps_at_once(scaling)
    lines = threads // 8  # that are copied at once: a multiple of 8, so that a thread's chunk stays where it is

    @device
    def following(place, smem):
        """The next place in the ring."""
        return place + stage_bytes if place < smem + ahead * stage_bytes else smem

    @device
    def copy_operand(shared, address, pitch, count, row, limit, k):
        """128 bytes of each of ``count`` rows from ``row`` on; zeros below row ``limit`` and from byte ``k`` on."""
        line, chunk = cuda.threadIdx.x >> 3, cuda.threadIdx.x & 7
        shared += line * _K + ((chunk ^ (line & 7)) << 4)
        address += i64(row + line) * pitch + 16 * chunk
        inside = min(max(k - 16 * chunk, 0), 16)
        for first in range(0, count, lines):
            size = inside if row + line + first < limit else 0
            cp_async_16(shared + first * _K, address + first * pitch, size)

    @device
    def copy_scales(shared, address, count, row, limit):
        for first in range(0, count, threads):
            line = cuda.threadIdx.x + first
            if line < count:
                cp_async_4(shared + 4 * line, address + 4 * i64(row + line), 4 if row + line < limit else 0)

    @device
    def copy(place, step, of_a, of_b, row, column, m, n, k):
        a, a_pitch, scale_a, scale_a_pitch = of_a
        b, b_pitch, scale_b, scale_b_pitch = of_b
        start = step * _K
        copy_operand(place, a + start, a_pitch, rows, row, m, k - start)
        copy_operand(place + at_b, b + start, b_pitch, columns, column, n, k - start)
        if along_k:
            copy_scales(place + at_scale_a, scale_a + 4 * i64(step) * scale_a_pitch, rows, row, m)
        if by_blocks:
            copy_scales(place + at_scale_b, scale_b + 4 * i64(step) * scale_b_pitch, columns, column, n)

    def mma_gemm(
        a, a_pitch, b, b_pitch, scale_a, scale_a_pitch, scale_b, scale_b_pitch, bias, seen, out, out_pitch, m, n, k
    ):  # fmt: skip
        smem = dynamic_shared()
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        tile_row, tile_column = corner(
            cuda.blockIdx.x, quotient(m + (rows - 1), rows), quotient(n + (columns - 1), columns)
        )
        row, column = tile_row * rows, tile_column * columns
        of_a = (a, a_pitch, scale_a, scale_a_pitch)
        of_b = (b, b_pitch, scale_b, scale_b_pitch)
        steps = (k + (_K - 1)) >> 7
        for step in range(ahead):
            if step < steps:
                copy(smem + step * stage_bytes, step, of_a, of_b, row, column, m, n, k)
            cp_async_commit()

        down, across = (warp & 1) * (16 * strips), (warp >> 1) * WARP_COLUMNS  # the warp's corner in the tile
        line_a, chunk_a = down + (lane & 15), lane >> 4
        line_b, chunk_b = across + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1
        at_x = line_a * _K + ((chunk_a ^ (line_a & 7)) << 4)
        at_y = at_b + line_b * _K + ((chunk_b ^ (line_b & 7)) << 4)
        first = down + (lane >> 2)
        pair = across + 2 * (lane & 3)  # of this thread's first register
        acc, place, free = zero(), smem, smem + ahead * stage_bytes
        for begin in range(i32(0), steps, i32(window)):
            held = (u32(0), u32(0))
            if by_block:
                held = load_blocks(scale_b, scale_b_pitch, column + across, n, begin, steps)
            for step in range(begin, min(i32(begin + window), steps)):
                cp_async_wait(pending)
                cuda.syncthreads()
                x = place + at_x
                y = place + at_y
                scale = np.float32(1)
                part = multiply(zero() if promote else acc, load_a(x), load_b(y))
                # Not before: now the tensor cores are busy meanwhile.
                if step + ahead < steps:
                    copy(free, step + ahead, of_a, of_b, row, column, m, n, k)
                cp_async_commit()
                part = multiply(part, load_a(x ^ 32), load_b(y ^ 32))
                part = multiply(part, load_a(x ^ 64), load_b(y ^ 64))
                part = multiply(part, load_a(x ^ 96), load_b(y ^ 96))
                if by_block:
                    scale = block_of(held, step)[0]
                if along_k:
                    acc = plus_scaled(acc, part, place + at_scale_a + 4 * first, place + at_scale_b + 4 * pair, scale)
                else:
                    acc = plus(acc, part) if promote else part
                place, free = following(place, smem), place

        both = np.float32(1)
        if not along_k and not by_row:
            both = load_f32(scale_a) * load_f32(scale_b)
        leave(acc, out, out_pitch, (both, scale_a, scale_b, bias, seen), row + first, m, column + pair, n)

    return Kernel(
        f"mma_gemm({product}, {tile})",
        mma_gemm,
        (*[i64] * 12, i32, i32, i32),
        threads,
        shared_bytes=tile.shared_bytes(scaling),
        architectures=("89", "120"),
    )


def _adder(product: Product, strips: int, strip: int = 0) -> Any:
    """A device function ``(acc, part, of_rows, of_columns, scale) -> acc + part``, part scaled; from ``strip`` on.

    ``of_rows``, ``of_columns``: where in shared memory the scales are, from this thread's first row and column on.
    ``scale``: what the columns have where they have but one.
    """
    count = WARP_COLUMNS // 2
    own = slice_of(strips * count, strip * count, count)
    by_block = product.scaling is Scaling.BLOCK
    plus_rows = add_rows(count)
    plus_both = add_rows_and_columns(count)

    @device
    def plus(acc, part, of_rows, of_columns, scale):
        address = of_rows + 64 * strip
        s, t = from_bits(shared_load_4(address)), from_bits(shared_load_4(address + 32))
        if by_block:
            return plus_rows(own(acc), own(part), s * scale, t * scale)
        return plus_both(own(acc), own(part), s, t, of_columns)

    if strip == strips - 1:
        return plus
    others = _adder(product, strips, strip + 1)

    @device
    def plus_all(acc, part, of_rows, of_columns, scale):
        return plus(acc, part, of_rows, of_columns, scale) + others(acc, part, of_rows, of_columns, scale)

    return plus_all


def _leaver(product: Product, strips: int, even: bool, strip: int = 0) -> Any:
    """A device function ``(acc, out, out_pitch, factors, row, m, column, n)``: what a warp has, from ``strip`` on.

    It finishes and stores it. ``row``, ``column``: of this thread's first register.
    """
    count = WARP_COLUMNS // 2
    own = slice_of(strips * count, strip * count, count)
    finish = finisher(product, count, even)
    store = store_all(count, product.out, even, product.accumulate)

    @device
    def leave(acc, out, out_pitch, factors, row, m, column, n):
        line = row + 16 * strip
        store(finish(own(acc), factors, line, m, column, n), out, out_pitch, line, m, column, n)

    if strip == strips - 1:
        return leave
    others = _leaver(product, strips, even, strip + 1)

    @device
    def leave_all(acc, out, out_pitch, factors, row, m, column, n):
        leave(acc, out, out_pitch, factors, row, m, column, n)
        others(acc, out, out_pitch, factors, row, m, column, n)

    return leave_all
