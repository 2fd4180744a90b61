"""How the block for dQ processes the keys with 64, 96 or 128 channels: a tile of 128 keys at a time.

K, V and transposed K of a tile are one stage of the ring, filled and released together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.attention.backward.memory import dq_offsets, dq_stages
from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.block import HALF_TILE, TILE, fill_stage, init_ring
from cuda_kernels.attention.products import make_product, make_register_product
from cuda_kernels.attention.row_scales import make_row_codes, tile_scales
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, AttentionSpec
from cuda_kernels.attention.stores import make_gradient_store
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
from cuda_kernels.attention.warp_roles import accumulator_origin
from cuda_kernels.device.fragments import add_rows, exp2_rows, rows_amax, rows_sum, score_gradients_rows, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import float_max, load_f32
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import mbarrier_arrive, mbarrier_wait, tma_load, wgmma_fence, wgmma_wait
from cuda_kernels.device.swizzle import smem_descriptor

_ZERO = np.float32(0)


class DqTiles(NamedTuple):
    """The parts of the kernel for dQ that depend on the number of channels.

    Attributes:
        offsets: the offsets of the block's buffers in shared memory, including ``out``.
        stages: the number of stages of the ring.
        init_ring: a device function of shared memory's address that initializes the ring's barriers.
        load_keys: a device function ``(smem, map_k, map_v, map_kt, tile, kv_head, rows_k)`` for the thread that copies.
        consume: a device function ``(smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right)
            -> dq, rest, rest_below``: this thread's dQ, without the softmax scale, and the sums of dS of both rows in
            its columns. ``row_terms``: Q's ``scale_inv`` times c, dO's, and for both rows the total and D;
            ``key_block``: the sequence's first block of scales.
        store: a device function as :func:`cuda_kernels.attention.stores.make_gradient_store` makes it, for the result
            of ``consume``.
    """

    offsets: dict[str, int]
    stages: int
    init_ring: Any
    load_keys: Any
    consume: Any
    store: Any


def make_tiles(spec: AttentionSpec) -> DqTiles:
    """For heads of at most 128 channels."""
    stages, offsets = dq_stages(spec), dq_offsets(spec)
    head_dim = spec.head_dim
    q_offset, do_offset, k_offset, v_offset, kt_offset, full_q, full, empty = (
        offsets[name] for name in ("q", "do", "k", "v", "kt", "full_q", "full", "empty")
    )
    transposed_bytes = head_dim * 128
    scores_count, sums_count = ROWS // 2, head_dim // 2
    zero_scores, zero_sums = zeros(scores_count), zeros(sums_count)
    scores_of, products_of = make_product(ROWS, spec.k_steps), make_register_product(head_dim, ROWS // 32)
    scores_wait_1, scores_wait_0 = wgmma_wait(scores_count, 1), wgmma_wait(scores_count, 0)
    sums_wait_0 = wgmma_wait(sums_count, 0)
    hide, exp2, gradients_of = make_band_mask(scores_count), exp2_rows(scores_count), score_gradients_rows(scores_count)
    amax_of, sum_of = rows_amax(scores_count), rows_sum(scores_count)
    codes_of, promote = make_row_codes(scores_count), add_rows(sums_count)
    next_stage, _ = stage_counters(stages)

    @device
    def init_ring_of_keys(smem):
        init_ring(smem + full, smem + empty, stages, 2)

    @device
    def load_keys(smem, map_k, map_v, map_kt, tile, kv_head, rows_k):
        first_key_row, first_tile, last_tile = tile[TILE_OTHERS], tile[TILE_FIRST], tile[TILE_LAST]
        stage_idx, phase = i32(0), i32(0)
        for j in range(first_tile, last_tile):
            barrier, key_row = smem + full + 8 * stage_idx, first_key_row + j * ROWS
            fill_stage(barrier, smem + empty + 8 * stage_idx, phase, 2 * TILE + transposed_bytes)
            tma_load(smem + k_offset + stage_idx * TILE, map_k, barrier, 0, kv_head * rows_k + key_row)
            tma_load(smem + v_offset + stage_idx * TILE, map_v, barrier, 0, kv_head * rows_k + key_row)
            tma_load(smem + kt_offset + stage_idx * transposed_bytes, map_kt, barrier, key_row, kv_head * head_dim)
            stage_idx, phase = next_stage(stage_idx, phase)

    @device
    def consume(smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right):
        scale_inv_k, scale_inv_v = scale_inv_k + key_block * 4, scale_inv_v + key_block * 4
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        query_factor, gradient_scale_inv, total, total_below, delta, delta_below = row_terms
        wg_thread = cuda.threadIdx.x & 127
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        own = wg_idx * HALF_TILE
        desc_q, desc_do = smem_descriptor(smem + q_offset + own), smem_descriptor(smem + do_offset + own)
        dq, rest, rest_below = zero_sums(), _ZERO, _ZERO
        next_key_scale_inv, next_value_scale_inv = np.float32(1), np.float32(1)
        if first_tile < last_tile:
            next_key_scale_inv, next_value_scale_inv = (
                load_f32(scale_inv_k + i64(first_tile) * 4),
                load_f32(scale_inv_v + i64(first_tile) * 4),
            )
        stage_idx, phase = i32(0), i32(0)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first_tile, last_tile):
            key_scale_inv, value_scale_inv = next_key_scale_inv, next_value_scale_inv
            # Coherent loads, which are not moved across barriers: scales of the next tile, a whole tile ahead.
            ahead = i64(min(i32(j + 1), i32(last_tile - 1))) * 4
            next_key_scale_inv, next_value_scale_inv = load_f32(scale_inv_k + ahead), load_f32(scale_inv_v + ahead)
            mbarrier_wait(smem + full + 8 * stage_idx, phase)
            wgmma_fence()
            scores = scores_of(zero_scores(), desc_q, smem_descriptor(smem + k_offset + stage_idx * TILE), 0)
            dp = scores_of(zero_scores(), desc_do, smem_descriptor(smem + v_offset + stage_idx * TILE), 0)
            scores = scores_wait_1(scores)
            if j < whole_first or j >= whole_last:
                scores = hide(scores, visible, i32(j * ROWS))
            p = exp2(scores, float_max(query_factor * key_scale_inv, SMALLEST), -total, -total_below)
            dp = scores_wait_0(dp)
            ds = gradients_of(dp, p, gradient_scale_inv * value_scale_inv, delta, delta_below)
            more, more_below = sum_of(ds)
            rest, rest_below = rest + more, rest_below + more_below
            amax, amax_below = amax_of(ds)
            scale, scale_below, unit, unit_below = tile_scales(amax, amax_below)
            words = codes_of(ds, scale, scale_below)
            wgmma_fence()
            part = products_of(zero_sums(), words, smem_descriptor(smem + kt_offset + stage_idx * transposed_bytes), 0)
            part = sums_wait_0(part)
            if wg_thread == 0:
                mbarrier_arrive(smem + empty + 8 * stage_idx)
            dq = promote(dq, part, unit * key_scale_inv, unit_below * key_scale_inv)
            stage_idx, phase = next_stage(stage_idx, phase)
        return dq, rest, rest_below

    return DqTiles(
        offsets, stages, init_ring_of_keys, load_keys, consume, make_gradient_store(head_dim, spec.out_dtype)
    )
