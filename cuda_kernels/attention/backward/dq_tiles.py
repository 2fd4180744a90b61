"""How the block for dQ processes the keys, a tile of 128 at a time.

**With 64, 96 or 128 channels** K, V and transposed K of a tile are one stage of the ring, filled and released together.

**With 256 channels** a tile is processed in parts. A thread's sums take 128 registers, and scores and their gradients
of 128 keys would take as many. They are therefore computed for 64, 32 and 32 keys, and rounded when the largest
gradient of all is known. The product with K adds 64 channels at a time. K, V and transposed K of a tile take 96 KB, and
two tiles do not fit besides Q and dO. They share the stages of a ring of :data:`.memory.WIDE_STAGES`, each refilled as
soon as it is empty. Each half of a stage has its own barrier: the wait between two products with transposed K prevents
the assembler from starting one before the previous sums are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels.attention.backward.memory import WIDE_STAGES, WIDE_TILE, dq_offsets, dq_stages, wide_dq_offsets
from cuda_kernels.attention.backward.running_scale import make_row_codes, tile_scales
from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.block import HALF_TILE, TILE, accumulator_origin, fill_stage, init_ring
from cuda_kernels.attention.products import found_again, make_product, make_register_product
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, AttentionSpec
from cuda_kernels.attention.stores import make_gradient_store
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
from cuda_kernels.device.fragments import add_rows, exp2_rows, rows_amax, rows_sum, score_gradients_rows, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import float_max, load_f32
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    tma_load,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import ROW_BYTES, advance_descriptor, smem_descriptor

_ZERO = np.float32(0)
_NEXT_CHANNELS = 64 * ROW_BYTES
"""Bytes from 64 channels of transposed K to the next 64."""


DqTiles = tuple[dict[str, int], int, Any, Any, Any, Any]
"""The parts of the kernel for dQ that depend on the number of channels:

- the offsets of the block's buffers in shared memory, including ``out``;
- the number of stages of the ring;
- a device function of shared memory's address that initializes the ring's barriers;
- a device function ``(smem, map_k, map_v, map_kt, tile, kv_head, rows_k)`` for the thread that copies;
- a device function ``(smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right) -> dq, rest,
  rest_below``: this thread's dQ, without the softmax scale, and the sums of dS of both rows in its columns.
  ``row_terms``: Q's ``scale_inv`` times c, dO's, and for both rows the total and D; ``key_block``: the sequence's first
  block of scales;
- a device function that stores dQ, as :func:`cuda_kernels.attention.stores.make_gradient_store` makes it.
"""


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

    return offsets, stages, init_ring_of_keys, load_keys, consume, make_gradient_store(head_dim, spec.out_dtype)


def _part(spec: AttentionSpec, num_keys: int) -> tuple[Any, Any, Any, Any]:
    """Device functions for some keys of a tile: dS, its rows' largest magnitudes and sums, and its codes."""
    num_registers = num_keys // 2
    zero_scores, scores_of = zeros(num_registers), make_product(num_keys, spec.k_steps, spec.panels)
    scores_wait_1, scores_wait_0 = wgmma_wait(num_registers, 1), wgmma_wait(num_registers, 0)
    hide, exp2 = make_band_mask(num_registers), exp2_rows(num_registers)
    gradients_of = score_gradients_rows(num_registers)

    @device
    def gradients(own, k, v, factor, gradient_factor, row_terms, seen, start, hidden):
        """dS of the keys with codes at ``k`` and ``v``; ``start``: the first one's column, used if ``hidden``."""
        _, _, total, total_below, delta, delta_below = row_terms
        desc_q = smem_descriptor(found_again(own))
        desc_do = advance_descriptor(desc_q, WIDE_TILE)
        wgmma_fence()
        scores = scores_of(zero_scores(), desc_q, smem_descriptor(k), 0)
        dp = scores_of(zero_scores(), desc_do, smem_descriptor(v), 0)
        scores = scores_wait_1(scores)
        if hidden:
            diagonal, end, left, right = seen
            diagonal = found_again(diagonal)
            scores = hide(scores, (i32(diagonal - left), i32(diagonal + right), end), start)
        p = exp2(scores, factor, -total, -total_below)
        return gradients_of(scores_wait_0(dp), p, gradient_factor, delta, delta_below)

    return gradients, rows_amax(num_registers), rows_sum(num_registers), make_row_codes(num_registers)


def make_wide_tiles(spec: AttentionSpec) -> DqTiles:
    """For heads of 256 channels."""
    offsets = wide_dq_offsets()
    q_offset, ring, full_q, full, empty = (offsets[name] for name in ("q", "ring", "full_q", "full", "empty"))
    zero_sums, sums_wait_0, promote = zeros(32), wgmma_wait(32, 0), add_rows(32)
    products_of = make_register_product(64, ROWS // 32)
    store_0, store_1, store_2, store_3 = (
        make_gradient_store(64, spec.out_dtype, start, again=start > 0) for start in range(0, 256, 64)
    )
    gradients, amax_of, sum_of, codes = _part(spec, 64)
    gradients_32, amax_of_32, sum_of_32, codes_32 = _part(spec, 32)
    next_stage = stage_counters(WIDE_STAGES)

    @device
    def open_stage(smem, stage_idx, phase):
        """Address of a stage and the barriers of its halves, once it is empty."""
        barrier = smem + full + 16 * stage_idx
        fill_stage(barrier, smem + empty + 8 * stage_idx, phase, TILE)
        mbarrier_arrive_expect_tx(barrier + 8, TILE)
        return smem + ring + stage_idx * WIDE_TILE, barrier

    @device
    def load_rows(shared, tensor, barrier, first_row):
        tma_load(shared, tensor, barrier, 0, first_row)
        tma_load(shared + TILE, tensor, barrier + 8, 128, first_row)

    @device
    def wait_for(smem, stage_idx, phase):
        mbarrier_wait(smem + full + 16 * stage_idx, phase)
        mbarrier_wait(smem + full + 16 * stage_idx + 8, phase)

    @device
    def init_ring(smem):
        for stage_idx in range(WIDE_STAGES):
            mbarrier_init(smem + full + 16 * stage_idx, 1)
            mbarrier_init(smem + full + 16 * stage_idx + 8, 1)
            mbarrier_init(smem + empty + 8 * stage_idx, 2)

    @device
    def load_keys(smem, map_k, map_v, map_kt, tile, kv_head, rows_k):
        first_key_row, first_tile, last_tile = tile[TILE_OTHERS], tile[TILE_FIRST], tile[TILE_LAST]
        stage_idx, phase = i32(0), i32(0)
        for j in range(first_tile, last_tile):
            key_row = first_key_row + j * ROWS
            shared, barrier = open_stage(smem, stage_idx, phase)
            load_rows(shared, map_k, barrier, kv_head * rows_k + key_row)
            stage_idx, phase = next_stage(stage_idx, phase)
            shared, barrier = open_stage(smem, stage_idx, phase)
            load_rows(shared, map_v, barrier, kv_head * rows_k + key_row)
            stage_idx, phase = next_stage(stage_idx, phase)
            shared, barrier = open_stage(smem, stage_idx, phase)
            tma_load(shared, map_kt, barrier, key_row, kv_head * 256)
            tma_load(shared + TILE, map_kt, barrier + 8, key_row, kv_head * 256 + 128)
            stage_idx, phase = next_stage(stage_idx, phase)

    @device
    def consume(smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        query_factor, gradient_scale_inv = row_terms[0], row_terms[1]
        wg_thread = cuda.threadIdx.x & 127
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        diagonal, _, end = visible_columns(tile, row_in_tile, col_in_tile, 0, 0)
        seen = diagonal, end, left, right
        own = i32(smem + q_offset + wg_idx * HALF_TILE)
        dq_0, dq_1, dq_2, dq_3, rest, rest_below = zero_sums(), zero_sums(), zero_sums(), zero_sums(), _ZERO, _ZERO
        first_block = i32(key_block)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first_tile, last_tile):
            of_block = i64(found_again(i32(first_block + j))) * 4
            key_scale_inv, value_scale_inv = load_f32(scale_inv_k + of_block), load_f32(scale_inv_v + of_block)
            fill = i32((j - first_tile) * 3)
            k_stage, v_stage, kt_stage = i32(fill & 3), i32((fill + 1) & 3), i32((fill + 2) & 3)
            k, v = smem + ring + k_stage * WIDE_TILE, smem + ring + v_stage * WIDE_TILE
            factor = float_max(query_factor * key_scale_inv, SMALLEST)
            gradient_factor = gradient_scale_inv * value_scale_inv
            hidden, start = j < whole_first or j >= whole_last, i32(j * ROWS)
            wait_for(smem, k_stage, fill >> 2 & 1)
            wait_for(smem, v_stage, (fill + 1) >> 2 & 1)
            ds = gradients(own, k, v, factor, gradient_factor, row_terms, seen, start, hidden)
            ds_2 = gradients_32(
                own, k + 64 * 128, v + 64 * 128, factor, gradient_factor, row_terms, seen,
                i32(start + 64), hidden,
            )  # fmt: skip
            ds_3 = gradients_32(
                own, k + 96 * 128, v + 96 * 128, factor, gradient_factor, row_terms, seen,
                i32(start + 96), hidden,
            )  # fmt: skip
            if wg_thread == 0:
                mbarrier_arrive(smem + empty + 8 * k_stage)
                mbarrier_arrive(smem + empty + 8 * v_stage)
            (x, x_below), (y, y_below), (z, z_below) = sum_of(ds), sum_of_32(ds_2), sum_of_32(ds_3)
            rest, rest_below = rest + (x + y + z), rest_below + (x_below + y_below + z_below)
            (x, x_below), (y, y_below), (z, z_below) = amax_of(ds), amax_of_32(ds_2), amax_of_32(ds_3)
            amax, amax_below = float_max(x, float_max(y, z)), float_max(x_below, float_max(y_below, z_below))
            scale, scale_below, unit, unit_below = tile_scales(amax, amax_below)
            words = (
                codes(ds, scale, scale_below) + codes_32(ds_2, scale, scale_below) + codes_32(ds_3, scale, scale_below)
            )
            desc_kt = smem_descriptor(smem + ring + kt_stage * WIDE_TILE)
            unit, unit_below = unit * key_scale_inv, unit_below * key_scale_inv
            mbarrier_wait(smem + full + 16 * kt_stage, (fill + 2) >> 2 & 1)
            wgmma_fence()
            part = sums_wait_0(products_of(zero_sums(), words, desc_kt, 0))
            dq_0 = promote(dq_0, part, unit, unit_below)
            wgmma_fence()
            part = sums_wait_0(products_of(zero_sums(), words, advance_descriptor(desc_kt, _NEXT_CHANNELS), 0))
            dq_1 = promote(dq_1, part, unit, unit_below)
            mbarrier_wait(smem + full + 16 * kt_stage + 8, (fill + 2) >> 2 & 1)
            wgmma_fence()
            part = sums_wait_0(products_of(zero_sums(), words, advance_descriptor(desc_kt, 2 * _NEXT_CHANNELS), 0))
            dq_2 = promote(dq_2, part, unit, unit_below)
            wgmma_fence()
            part = sums_wait_0(products_of(zero_sums(), words, advance_descriptor(desc_kt, 3 * _NEXT_CHANNELS), 0))
            if wg_thread == 0:
                mbarrier_arrive(smem + empty + 8 * kt_stage)
            dq_3 = promote(dq_3, part, unit, unit_below)
        return (dq_0, dq_1, dq_2, dq_3), rest, rest_below

    @device
    def store(dq, factor, shared, out, tile, head, warp, strides):
        store_0(dq[0], factor, shared, out, tile, head, warp, strides)
        store_1(dq[1], factor, shared, out, tile, head, warp, strides)
        store_2(dq[2], factor, shared, out, tile, head, warp, strides)
        store_3(dq[3], factor, shared, out, tile, head, warp, strides)

    return offsets, WIDE_STAGES, init_ring, load_keys, consume, store
