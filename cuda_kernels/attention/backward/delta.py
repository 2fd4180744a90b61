"""The cast of dO, with D = rowsum(dO ∘ O) and the other statistics of queries for the backward (:mod:`.statistics`).

D is of the same codes of dO that dP is computed from: only so do the rows of dS sum to 0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.attention.backward.statistics import DELTA, GRADIENT_SCALE_INV, QUERY_SCALE_INV, STATISTICS, TOTAL
from cuda_kernels.attention.casts.cast import AMAX_BYTES, make_heads_cast
from cuda_kernels.attention.casts.heads import GROUP, HeadsSpec, make_heads_reader
from cuda_kernels.attention.spec import ROWS
from cuda_kernels.device.language import cuda, i32, i64, u32
from cuda_kernels.device.ptx import (
    bits,
    dynamic_shared,
    e4m3_pair,
    from_bits,
    high_half,
    load_f32,
    log2_approx,
    low_half,
    shared_load_4,
    shared_store_4,
    store_f32,
)
from cuda_kernels.kernel import Kernel, typed

_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)
_low, _high = low_half["bfloat16"], high_half["bfloat16"]
_LINE = 4 * (ROWS + 1)
"""Bytes of a quad of channels' sums in shared memory; odd in words, so that a warp stores without bank conflicts."""


@cache
def quantize_gradients_kernel(spec: HeadsSpec) -> Kernel:
    """dO's codes, both copies, and the statistics of queries, except ``CORRECTED``.

    Parameters are the addresses of dO, of the table of its rows, of the row copy, the transposed copy and its
    ``scale_inv``, of o in bfloat16, m, l, Q's ``scale_inv`` and the statistics (:mod:`.statistics`); the number of
    heads and of packed rows; and the strides in elements, between sequences, rows and heads, of dO and of o, whose
    rows start at multiples of 8 elements.
    """
    head_dim, quads = spec.head_dim, spec.quads
    cast = make_heads_cast(spec, True, True, False)
    read_o = make_heads_reader(HeadsSpec(head_dim, "bfloat16", 4))
    num_values = 2 * GROUP
    partial_sums = AMAX_BYTES + ROWS * head_dim

    def quantize_gradients(
        x, table, out, out_t, scale_inv, o, m, l, scale_inv_q, statistics,  # noqa: E741
        heads, packed_rows, stride_b, stride_l, stride_h, o_stride_b, o_stride_l, o_stride_h,
    ):  # fmt: skip
        block, thread = i32(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        values, packed = cuda.local.array(num_values, u32), cuda.local.array(GROUP, u32)
        read_o(block, o, table, heads, o_stride_b, o_stride_l, o_stride_h, values)
        head, packed_row, rows_left, group, quad, gradient_scale_inv = cast(
            block, packed, x, table, 0, out, out_t, scale_inv, heads, packed_rows, 0, stride_b, stride_l, stride_h
        )
        shared = dynamic_shared() + partial_sums
        for step in range(GROUP):
            (a, b), (c, d) = e4m3_pair(packed[step]), e4m3_pair(packed[step] >> np.uint32(16))
            first, second = values[2 * step], values[2 * step + 1]
            total = a * _low(first) + b * _high(first) + c * _low(second) + d * _high(second)
            shared_store_4(shared + quad * _LINE + (group * GROUP + step) * 4, bits(total))
        cuda.syncthreads()
        if thread < ROWS:
            delta, total, its_row = _ZERO, _INFINITY, i64(head) * packed_rows + packed_row + thread
            for each in range(quads):
                delta += from_bits(shared_load_4(shared + each * _LINE + thread * 4))
            sum_of_row = load_f32(l + its_row * 4)
            if thread < rows_left + group * GROUP and sum_of_row != _ZERO:
                total = load_f32(m + its_row * 4) + log2_approx(sum_of_row)
            mine = statistics + (i64(head) * STATISTICS * packed_rows + packed_row + thread) * 4
            store_f32(mine + i64(DELTA) * packed_rows * 4, delta * gradient_scale_inv)
            store_f32(mine + i64(TOTAL) * packed_rows * 4, total)
            store_f32(mine + i64(GRADIENT_SCALE_INV) * packed_rows * 4, gradient_scale_inv)
            query_scale_inv = load_f32(scale_inv_q + (i64(head) * (packed_rows >> 7) + (packed_row >> 7)) * 4)
            store_f32(mine + i64(QUERY_SCALE_INV) * packed_rows * 4, query_scale_inv)

    return Kernel(
        f"quantize_gradients({spec})",
        quantize_gradients,
        {
            **typed(i64, "x table out out_t scale_inv o m l scale_inv_q statistics"),
            **typed(i32, "heads packed_rows"),
            **typed(i64, "stride_b stride_l stride_h o_stride_b o_stride_l o_stride_h"),
        },
        spec.threads,
        shared_bytes=partial_sums + quads * _LINE,
        min_blocks_per_sm=max(1, 512 // spec.threads),
    )
