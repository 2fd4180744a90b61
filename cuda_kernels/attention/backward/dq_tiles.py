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
    same_size = sums_count == scores_count
    scores_of, products_of = make_product(ROWS, spec.k_steps), make_register_product(head_dim, ROWS // 32)
    scores_wait_1, scores_wait_0 = wgmma_wait(scores_count, 1), wgmma_wait(scores_count, 0)
    sums_wait_0 = wgmma_wait(sums_count, 0)
    hide, exp2, gradients_of = make_band_mask(scores_count), exp2_rows(scores_count), score_gradients_rows(scores_count)
    amax_of, sum_of = rows_amax(scores_count), rows_sum(scores_count)
    codes_of, promote = make_row_codes(scores_count), add_rows(sums_count)
    next_stage = stage_counters(stages)

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
    def start_scores(block, registers, stage_idx, phase):
        """Issue S = Q Kᵀ of the tile in a stage, once it is loaded."""
        smem, desc_q = block[0], block[1]
        mbarrier_wait(smem + full + 8 * stage_idx, phase)
        wgmma_fence()
        return scores_of(registers, desc_q, smem_descriptor(smem + k_offset + stage_idx * TILE), 0)

    @device
    def start_dp(block, registers, stage_idx):
        """Issue dP = dO Vᵀ."""
        smem, desc_do = block[0], block[2]
        wgmma_fence()
        return scores_of(registers, desc_do, smem_descriptor(smem + v_offset + stage_idx * TILE), 0)

    @device
    def start_part(block, registers, words, stage_idx):
        """Issue a tile's part of dQ, the product of the codes of dS and K."""
        wgmma_fence()
        return products_of(registers, words, smem_descriptor(block[0] + kt_offset + stage_idx * transposed_bytes), 0)

    @device
    def scales_of(block, j):
        """The ``scale_inv`` of K and V of tile ``j``, by coherent loads, which are not moved across barriers."""
        scale_inv_k, scale_inv_v = block[5]
        return load_f32(scale_inv_k + i64(j) * 4), load_f32(scale_inv_v + i64(j) * 4)

    @device
    def probabilities(block, j, scores, key_scale_inv):
        query_factor, _, total, total_below, _, _ = block[3]
        visible, whole_first, whole_last = block[4]
        if j < whole_first or j >= whole_last:
            scores = hide(scores, visible, i32(j * ROWS))
        return exp2(scores, float_max(query_factor * key_scale_inv, SMALLEST), -total, -total_below)

    @device
    def gradients(block, p, dp, rests, value_scale_inv):
        """dS of a tile; and the sums of its rows, added to ``rests``."""
        _, gradient_scale_inv, _, _, delta, delta_below = block[3]
        ds = gradients_of(dp, p, gradient_scale_inv * value_scale_inv, delta, delta_below)
        more, more_below = sum_of(ds)
        return ds, (rests[0] + more, rests[1] + more_below)

    @device
    def rounded(ds):
        """Codes of dS, and the units of its rows."""
        amax, amax_below = amax_of(ds)
        scale, scale_below, unit, unit_below = tile_scales(amax, amax_below)
        return codes_of(ds, scale, scale_below), (unit, unit_below)

    @device
    def release(block, stage_idx):
        if cuda.threadIdx.x & 127 == 0:
            mbarrier_arrive(block[0] + empty + 8 * stage_idx)

    @device
    def step(block, j, state):
        """dS of tile ``j`` and its part of dQ, and P of the next tile and its product for dP.

        Three sets of registers suffice at 128 channels: each product is written to those that have just been read. The
        assembler cannot move these reads behind the product, as it does if there are more.
        """
        stage_idx, phase, p, dp, dq, rests, key_scale_inv, value_scale_inv = state
        next_key_scale_inv, next_value_scale_inv = scales_of(block, i32(j + 1))
        next_idx, next_phase = next_stage(stage_idx, phase)
        dp = scores_wait_0(dp)
        ds, rests = gradients(block, p, dp, rests, value_scale_inv)
        scores = start_scores(block, dp, next_idx, next_phase)
        words, units = rounded(ds)
        part = start_part(block, ds if same_size else zero_sums(), words, stage_idx)
        scores = scores_wait_1(scores)
        next_p = probabilities(block, i32(j + 1), scores, next_key_scale_inv)
        part = sums_wait_0(part)
        release(block, stage_idx)
        dq = promote(dq, part, units[0] * key_scale_inv, units[1] * key_scale_inv)
        next_dp = start_dp(block, part if same_size else zero_scores(), next_idx)
        return next_idx, next_phase, next_p, next_dp, dq, rests, next_key_scale_inv, next_value_scale_inv

    @device
    def consume(smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        own = wg_idx * HALF_TILE
        block = (
            smem,
            smem_descriptor(smem + q_offset + own),
            smem_descriptor(smem + do_offset + own),
            row_terms,
            (visible_columns(tile, row_in_tile, col_in_tile, left, right), whole_first, whole_last),
            (scale_inv_k + key_block * 4, scale_inv_v + key_block * 4),
        )
        dq, rests = zero_sums(), (_ZERO, _ZERO)
        mbarrier_wait(smem + full_q, 0)
        if first_tile < last_tile:
            key_scale_inv, value_scale_inv = scales_of(block, first_tile)
            scores = scores_wait_0(start_scores(block, zero_scores(), i32(0), i32(0)))
            dp = start_dp(block, zero_scores(), i32(0))
            p = probabilities(block, first_tile, scores, key_scale_inv)
            state = i32(0), i32(0), p, dp, dq, rests, key_scale_inv, value_scale_inv
            for j in range(first_tile, i32(last_tile - 1)):
                state = step(block, i32(j), state)
            stage_idx, _, p, dp, dq, rests, key_scale_inv, value_scale_inv = state
            ds, rests = gradients(block, p, scores_wait_0(dp), rests, value_scale_inv)
            words, units = rounded(ds)
            part = sums_wait_0(start_part(block, zero_sums(), words, stage_idx))
            dq = promote(dq, part, units[0] * key_scale_inv, units[1] * key_scale_inv)
        return dq, rests[0], rests[1]

    return DqTiles(
        offsets, stages, init_ring_of_keys, load_keys, consume, make_gradient_store(head_dim, spec.out_dtype)
    )
