"""D = rowsum(dO ∘ O) and the other statistics of queries for the backward pass: see :mod:`.statistics`.

A block processes 128 rows of one head. dO is decoded from its codes, because dP is computed from them: only with the
same codes do the rows of dS sum to 0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.attention.backward.statistics import DELTA, GRADIENT_SCALE_INV, QUERY_SCALE_INV, STATISTICS, TOTAL
from cuda_kernels.attention.spec import HEAD_DIMS, ROWS, TILE_OUT_ROW, TILE_ROW, TILE_SEQUENCE, TILE_VALID
from cuda_kernels.attention.tiles import tile_of
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import (
    bits,
    e4m3_pair,
    from_bits,
    high_half,
    load_16_if,
    load_f32,
    log2_approx,
    low_half,
    quotient,
    remainder,
    shuffle_xor,
    store_f32,
)
from cuda_kernels.kernel import Kernel, typed

_THREADS = 256
_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)
_low, _high = low_half["bfloat16"], high_half["bfloat16"]


@device
def _products(total, codes, first, second):
    """``total`` plus four codes times four bfloat16 numbers in two registers."""
    a, b = e4m3_pair(codes)
    c, d = e4m3_pair(codes >> np.uint32(16))
    return total + a * _low(first) + b * _high(first) + c * _low(second) + d * _high(second)


@cache
def attention_delta_kernel(head_dim: int) -> Kernel:
    """Statistics of queries of ``head_dim`` channels, except ``CORRECTED``.

    Parameters are the addresses of the table of tiles, of dO's codes, dO's and Q's ``scale_inv``, o in bfloat16, m, l
    and the statistics (:mod:`.statistics`); the number of heads at once and the packed rows of queries; and the strides
    of o in elements, between sequences, rows and heads, which are multiples of 8. The grid is that of
    :func:`cuda_kernels.attention.tiles.tile_of`.
    """
    assert head_dim in HEAD_DIMS
    threads_per_row = 4 if head_dim == 64 else 8 if head_dim <= 128 else 16  # 16 channels each
    rows_at_once = _THREADS // threads_per_row
    passes = ROWS // rows_at_once

    @device
    def dot(codes_row, values_row, inside, thread_in_row):
        """The sum of a row's products, in all of its threads; 0 unless ``inside``. Arguments: addresses of the row."""
        inside = inside and 16 * thread_in_row < head_dim
        codes = load_16_if(codes_row + 16 * thread_in_row, inside)
        first_half = load_16_if(values_row + 32 * thread_in_row, inside)
        second_half = load_16_if(values_row + (32 * thread_in_row + 16), inside)
        total = _products(_ZERO, codes[0], first_half[0], first_half[1])
        total = _products(total, codes[1], first_half[2], first_half[3])
        total = _products(total, codes[2], second_half[0], second_half[1])
        total = _products(total, codes[3], second_half[2], second_half[3])
        total = total + from_bits(shuffle_xor(bits(total), 1))
        total = total + from_bits(shuffle_xor(bits(total), 2))
        if threads_per_row > 4:
            total = total + from_bits(shuffle_xor(bits(total), 4))
        if threads_per_row > 8:
            total = total + from_bits(shuffle_xor(bits(total), 8))
        return total

    def attention_delta(
        table, do, scale_inv_do, scale_inv_q, o, m, l, statistics,  # noqa: E741
        heads_at_once, rows_q, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        tile, head = tile_of(table, heads_at_once)
        first_row, valid, sequence, out_row = tile[TILE_ROW], tile[TILE_VALID], tile[TILE_SEQUENCE], tile[TILE_OUT_ROW]
        block = (i64(head) * (rows_q >> 7) + (first_row >> 7)) * 4
        gradient_scale_inv = load_f32(scale_inv_do + block)
        packed = i64(head) * rows_q + first_row
        mine = statistics + (i64(head) * STATISTICS * rows_q + first_row) * 4
        thread_in_row = remainder(cuda.threadIdx.x, i32(threads_per_row))
        for step in range(passes):
            row_in_tile = i32(step * rows_at_once + quotient(cuda.threadIdx.x, i32(threads_per_row)))
            place = i64(sequence) * stride_b + i64(out_row + row_in_tile) * stride_l + i64(head) * stride_h
            total = dot(do + (packed + row_in_tile) * head_dim, o + place * 2, row_in_tile < valid, thread_in_row)
            if thread_in_row == 0:
                store_f32(mine + (i64(DELTA) * rows_q + row_in_tile) * 4, total * gradient_scale_inv)
        row_in_tile = cuda.threadIdx.x
        if row_in_tile < ROWS:
            sum_of_row, total = load_f32(l + (packed + row_in_tile) * 4), _INFINITY
            if row_in_tile < valid and sum_of_row != _ZERO:
                total = load_f32(m + (packed + row_in_tile) * 4) + log2_approx(sum_of_row)
            store_f32(mine + (i64(TOTAL) * rows_q + row_in_tile) * 4, total)
            store_f32(mine + (i64(GRADIENT_SCALE_INV) * rows_q + row_in_tile) * 4, gradient_scale_inv)
            store_f32(mine + (i64(QUERY_SCALE_INV) * rows_q + row_in_tile) * 4, load_f32(scale_inv_q + block))

    parameters = {
        **typed(i64, "table do scale_inv_do scale_inv_q o m l statistics"),
        **typed(i32, "heads_at_once rows_q"),
        **typed(i64, "stride_b stride_l stride_h"),
    }
    return Kernel(f"attention_delta(d={head_dim})", attention_delta, parameters, _THREADS)
