"""dK or dV without wgmma for heads with 256 channels, 128 channels of the result per block: rows are keys.

A thread has registers for one sum of 128 channels besides the scores of a tile, as in :mod:`.dkv`. dV and dK have a
launch each, and each half of a result has its own block, which recomputes the probabilities: 16 products of 128
channels per tile instead of eight.

Codes of K and, for dK, of V take 32 KB each of a block's 99 KB. Q of 64 queries, for dK also dO, and 128 channels of a
transposed copy share a ring of two stages; one is copied while the other is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from cuda_kernels.attention.backward.running_scale import START
from cuda_kernels.attention.backward.statistics import (
    CODE_UNIT,
    CORRECTED,
    GRADIENT_SCALE_INV,
    QUERY_SCALE_INV,
    SMALLEST,
    TOTAL,
)
from cuda_kernels.attention.mma.dkv import (
    QUERIES,
    STATISTICS_BYTES,
    dkv_pass,
    make_gradients,
    make_query_statistics,
    make_rounded,
)
from cuda_kernels.attention.mma.operands import CHANNELS, LINE, TILE, make_half_copy, make_row_copy
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.mma.results import own_place
from cuda_kernels.attention.spec import TILE_OTHERS, AttentionSpec
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
from cuda_kernels.device.fragments import exp2_columns, rows_amax, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import cp_async_commit, cp_async_wait, float_max, from_bits, shared_load_4, warp_any
from cuda_kernels.device.swizzle import ldmatrix_a, ldmatrix_b
from cuda_kernels.kernel import Kernel

_STAGE = CHANNELS * LINE
"""Bytes of 128 channels of a tile's transposed queries, half of each line; or of its 64 queries."""
_ZERO = np.float32(0)


@cache
def make_wide_dkv(spec: AttentionSpec, result: Literal["dk", "dv"]) -> Kernel:
    """``dk`` or ``dv`` of the reference's ``backward``, in ``spec.out_dtype``.

    Parameters are those of :func:`cuda_kernels.attention.mma.dkv.mma_attention_dkv_kernel`; a tile of a head has two
    consecutive blocks.
    """
    is_dk, head_dim, panels = result == "dk", spec.head_dim, spec.panels
    v_offset = panels * TILE
    ring = 2 * v_offset if is_dk else v_offset
    statistics_offset = ring + 2 * _STAGE
    num_registers = QUERIES // 2
    copy_queries, copy_half = make_row_copy(QUERIES, head_dim), make_half_copy(CHANNELS)
    product = make_product(QUERIES, spec.k_steps, panels=panels, panel_rows=QUERIES)
    gradients_of, add_product = make_gradients(spec, v_offset), make_add_product(CHANNELS, QUERIES // STEP)
    hide, exp2, amax_of = make_band_mask(num_registers), exp2_columns(num_registers), rows_amax(num_registers)
    rounded, zero_sums = make_rounded(num_registers), zeros(CHANNELS // 2)
    copy_statistics, statistic, two_of_d = make_query_statistics(statistics_offset)

    @device
    def copy_q(smem, stage, addresses, rows_q, head, query):
        """``query``: the tile's first packed row. All threads must be done with the last tile's statistics."""
        copy_queries(stage, addresses[0] + (i64(head) * rows_q + query) * head_dim, i64(head_dim))
        copy_statistics(smem, 0, addresses[4], head, rows_q, query)

    @device
    def attend(smem, tile, addresses, rows_q, first_head, group, key_factor, value_scale_inv, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        own_row, own_column = own_place()
        visible = visible_columns(tile, own_row, own_column, left, right)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        in_k, in_b = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane)), i32(smem + ring + ldmatrix_b(lane))
        sums, limits = zero_sums(), (START, START)
        here, queries, end = i32(0), tile[TILE_OTHERS], i32(first_head + group)
        if first_tile < last_tile:
            copy_q(smem, smem + ring, addresses, rows_q, first_head, queries + first_tile * QUERIES)
        cp_async_commit()
        for head in range(first_head, end):
            for i in range(first_tile, last_tile):
                there, query = i32(here ^ _STAGE), i32(queries + i * QUERIES)
                transposed = here if is_dk else there
                of_channels = i64(head) * head_dim * rows_q + query
                cp_async_wait(0)
                cuda.syncthreads()  # Q has arrived, and all threads are done with the previous tile
                if is_dk:
                    row_address = addresses[1] + (i64(head) * rows_q + query) * head_dim
                    copy_queries(smem + ring + there, row_address, i64(head_dim))
                else:
                    copy_half(smem + ring + transposed, 0, addresses[3] + of_channels, i64(rows_q))
                cp_async_commit()
                query_scale_inv = from_bits(shared_load_4(statistic(smem, 0, QUERY_SCALE_INV, own_column)))
                gradient_scale_inv = from_bits(shared_load_4(statistic(smem, 0, GRADIENT_SCALE_INV, own_column)))
                scores = product(in_k, in_b + here)
                if i < whole_first or i >= whole_last:
                    scores = hide(scores, visible, i32(i * QUERIES))
                factor = float_max(key_factor * query_scale_inv, SMALLEST)
                p_or_ds = exp2(scores, factor, statistic(smem, 0, TOTAL, own_column))
                its_factor = gradient_scale_inv
                if is_dk:
                    cp_async_wait(0)
                    cuda.syncthreads()  # dO has arrived, and all threads are done with Q
                    copy_half(smem + ring + transposed, 0, addresses[2] + of_channels, i64(rows_q))
                    cp_async_commit()
                    corrected = statistic(smem, 0, CORRECTED, own_column)
                    p_or_ds = gradients_of(p_or_ds, in_k, in_b + there, value_scale_inv * gradient_scale_inv, corrected)
                    its_factor = query_scale_inv
                amax, amax_below = amax_of(p_or_ds)
                words, limits = rounded(p_or_ds, its_factor, amax, amax_below, limits)
                d = _ZERO if is_dk else two_of_d(smem, 0)
                cp_async_wait(0)
                cuda.syncthreads()  # the transposed copy has arrived, and all threads are done with the other stage
                free = smem + ring + (transposed ^ _STAGE)
                if i + 1 < last_tile:
                    copy_q(smem, free, addresses, rows_q, head, query + QUERIES)
                elif head + 1 < end:
                    copy_q(smem, free, addresses, rows_q, head + 1, queries + first_tile * QUERIES)
                cp_async_commit()
                # Codes that are all 0, as in fully masked tiles, can be skipped unless they meet NaN.
                if warp_any(amax != _ZERO or amax_below != _ZERO or d != d):
                    unit, unit_below = limits[0] * CODE_UNIT, limits[1] * CODE_UNIT
                    sums = add_product(sums, words, in_b + transposed, unit, unit_below)
                here = i32(transposed ^ _STAGE)
        return sums, sums

    return dkv_pass(spec, result, attend, statistics_offset + STATISTICS_BYTES)
