"""FP8 attention's forward pass on Hopper: a producer warp copies with TMA, two warpgroups multiply in turns.

A block has 128 queries of one head, 64 for each warpgroup, and walks over the keys that they see, 128 at a time. Codes
of K and transposed V lie in a ring of stages in shared memory, each with a ``full`` barrier that counts the bytes that
TMA wrote and an ``empty`` one for the two warpgroups that read it. Of each tile a warpgroup computes S = Q Kᵀ, hands
the tensor cores over, turns S into P in registers, which is then the left operand of P V without leaving them, and adds
the product in float32 by the instruction that rescales the sum anyway: the tensor cores' short accumulator (about 14
bits, DeepSeek-V3, arXiv:2412.19437) never sums more than 128 products. One warpgroup's exponentials run beside the
other's products (FlashAttention-3, arXiv:2407.08608, section 3.1).

The numerics are those of the reference's ``forward``: scales of Q and K are in the factor of the
scores; that of V is what a sum is a multiple of, so that it changes with a factor of the whole sum.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.block import HALF_TILE, TILE, fill_stage, init_ring, make_row_load, per_stage, placed
from cuda_kernels.attention.products import make_product, make_register_product
from cuda_kernels.attention.softmax import START, make_softmax, store_statistics
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES, make_result_store
from cuda_kernels.attention.tiles import make_band_mask, tile_again, visible_columns, visited_tiles
from cuda_kernels.attention.warp_roles import PRODUCER, accumulator_origin, attention_on_hopper, make_warp_specialized
from cuda_kernels.device.fragments import rescale_add_rows, scale_all, zeros
from cuda_kernels.device.language import cuda, device, f32, i32, i64, tensor_map
from cuda_kernels.device.ptx import (
    dynamic_shared,
    float_max,
    from_bits,
    load_4_if,
    load_f32,
    quotient,
    reciprocal_approx,
)
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    address_of,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    named_barrier_arrive,
    tma_load,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import advance_descriptor, smem_descriptor
from cuda_kernels.kernel import Kernel, typed

STAGES = {64: 4, 96: 3, 128: 3, 256: 2}
"""Stages of the ring of keys and values, by channels of a head."""
_TURN = 2
"""The first of two named barriers, one for each warpgroup's turn to multiply."""
_ONE = np.float32(1)
_LEAST_UNIT, _LARGEST_UNIT = np.float32(2.0**-24), np.float32(2.0**24)
"""Scales of V that sums may be multiples of: near 1, so that sums have the range that the specification's have."""


def smem_offsets(spec: AttentionSpec, stages: int) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the size of all."""
    ring = per_stage(stages, k=spec.panels * TILE, v=spec.head_dim * 128)
    barriers = per_stage(stages, full_k=8, full_v=8, empty_k=8, empty_v=8)
    return placed(q=spec.panels * TILE, **ring, out=8 * WARP_BYTES, full_q=8, **barriers)


@cache
def attention_forward_kernel(spec: AttentionSpec) -> Kernel:
    """``o`` and the statistics ``m`` and ``l`` of the reference's ``forward``.

    Parameters are the tensor maps of Q, K and transposed V (:mod:`.spec` says how they lie); the addresses of the table
    of tiles, of the ``scale_inv`` of Q, K and V, of out, m and l; the heads, how many of them share one of K and V, the
    packed rows of queries and of keys, the band's limits; the softmax scale times log2(e), which is positive; and the
    strides of out in elements, from a sequence to the next, a row and a head.
    """
    stages = STAGES[spec.head_dim]
    head_dim, panels = spec.head_dim, spec.panels
    offsets = smem_offsets(spec, stages)
    q_offset, k_offset, v_offset, out_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "out", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    q_bytes, k_bytes, v_bytes = panels * TILE, panels * TILE, head_dim * 128
    columns = min(head_dim, 128)
    two_halves = head_dim > 128
    scores_count, acc_count = ROWS // 2, columns // 2
    zero_scores, zero_acc = zeros(scores_count), zeros(acc_count)
    scores_of = make_product(ROWS, spec.k_steps, panels)
    times_v = make_register_product(columns, ROWS // 32)
    scores_done, part_done = wgmma_wait(scores_count, 0), wgmma_wait(acc_count, 0)
    hide, softmax = make_band_mask(scores_count), make_softmax(ROWS)
    scaled, rescale_add = scale_all(acc_count), rescale_add_rows(acc_count)
    store = make_result_store(columns, spec.out_dtype)
    store_high = make_result_store(columns, spec.out_dtype, 128, again=True)
    load_rows = make_row_load(panels)
    next_stage, _ = stage_counters(stages)

    @device
    def init_barriers(smem):
        mbarrier_init(smem + full_q, 1)
        init_ring(smem + full_k, smem + empty_k, stages, 2)
        init_ring(smem + full_v, smem + empty_v, stages, 2)

    @device
    def produce(smem, maps, tile, head, shape):
        group, rows_q, rows_k = shape
        kv_head = quotient(head, group)
        packed_row, first_key_row = tile[TILE_ROW], tile[TILE_OTHERS]
        first_tile, last_tile = tile[TILE_FIRST], tile[TILE_LAST]
        mbarrier_arrive_expect_tx(smem + full_q, q_bytes)
        load_rows(smem + q_offset, maps[0], smem + full_q, head * rows_q + packed_row)
        stage_idx, phase = i32(0), i32(0)
        for j in range(first_tile, last_tile):
            full, empty = smem + full_k + 8 * stage_idx, smem + empty_k + 8 * stage_idx
            fill_stage(full, empty, phase, k_bytes)
            load_rows(smem + k_offset + stage_idx * k_bytes, maps[1], full, kv_head * rows_k + first_key_row + j * ROWS)
            full, empty = smem + full_v + 8 * stage_idx, smem + empty_v + 8 * stage_idx
            fill_stage(full, empty, phase, v_bytes)
            tma_load(smem + v_offset + stage_idx * v_bytes, maps[2], full, first_key_row + j * ROWS, kv_head * head_dim)
            stage_idx, phase = next_stage(stage_idx, phase)

    begin = make_warp_specialized(init_barriers, produce)

    @device
    def values_of(words, desc_v):
        """The product of P's codes with 128 channels of V."""
        wgmma_fence()
        return part_done(times_v(zero_acc(), words, desc_v, 0))

    @device
    def consume(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        """The sums of both halves of the channels, the unit that they are multiples of, and the softmax's state."""
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        wg_thread = cuda.threadIdx.x & 127
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        query_factor = from_bits(load_4_if(scale_inv_q, True)) * c
        desc_q = smem_descriptor(smem + q_offset + wg_idx * HALF_TILE)
        softmax_state = START
        acc_o, acc_o_high = zero_acc(), zero_acc()
        unit = _ONE
        next_key_scale_inv = from_bits(load_4_if(scale_inv_k + i64(first_tile) * 4, first_tile < last_tile))
        next_value_scale_inv = from_bits(load_4_if(scale_inv_v + i64(first_tile) * 4, first_tile < last_tile))
        stage_idx, phase = i32(0), i32(0)
        if wg_idx == 1:  # the first turn is the other's
            named_barrier_arrive(_TURN, 256)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first_tile, last_tile):
            factor = float_max(query_factor * next_key_scale_inv, SMALLEST)
            value_scale_inv = next_value_scale_inv
            # Coherent loads, which stay in front of the barriers: those of the next tile, a whole tile ahead.
            ahead = i64(min(i32(j + 1), i32(last_tile - 1))) * 4
            next_key_scale_inv, next_value_scale_inv = load_f32(scale_inv_k + ahead), load_f32(scale_inv_v + ahead)
            desc_k = smem_descriptor(smem + k_offset + stage_idx * k_bytes)
            desc_v = smem_descriptor(smem + v_offset + stage_idx * v_bytes)
            mbarrier_wait(smem + full_k + 8 * stage_idx, phase)
            named_barrier(_TURN + wg_idx, 256)
            wgmma_fence()
            scores = scores_done(scores_of(zero_scores(), desc_q, desc_k, 0))
            named_barrier_arrive(_TURN + 1 - wg_idx, 256)
            if wg_thread == 0:
                mbarrier_arrive(smem + empty_k + 8 * stage_idx)
            if j < whole_first or j >= whole_last:
                scores = hide(scores, visible, i32(j * ROWS))
            words, softmax_state, alpha, alpha_below = softmax(scores, factor, softmax_state)
            mbarrier_wait(smem + full_v + 8 * stage_idx, phase)
            part = values_of(words, desc_v)
            usual = _LEAST_UNIT <= value_scale_inv <= _LARGEST_UNIT
            ratio = _ONE
            if usual:
                ratio = unit * reciprocal_approx(value_scale_inv)
                unit = value_scale_inv
            else:
                part = scaled(part, value_scale_inv * reciprocal_approx(unit))
            acc_o = rescale_add(acc_o, part, alpha * ratio, alpha_below * ratio)
            if two_halves:
                part = values_of(words, advance_descriptor(desc_v, TILE))
                if not usual:
                    part = scaled(part, value_scale_inv * reciprocal_approx(unit))
                acc_o_high = rescale_add(acc_o_high, part, alpha * ratio, alpha_below * ratio)
            if wg_thread == 0:
                mbarrier_arrive(smem + empty_v + 8 * stage_idx)
            stage_idx, phase = next_stage(stage_idx, phase)
        return acc_o, acc_o_high, unit, softmax_state

    def attention_forward(
        map_q, map_k, map_v, table, scale_inv_q, scale_inv_k, scale_inv_v, out, m, l,  # noqa: E741
        heads, group, rows_q, rows_k, left, right, c, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        maps = address_of(map_q), address_of(map_k), address_of(map_v)
        smem = dynamic_shared()
        tile, head, wg_idx, warp = begin(smem, maps, table, heads, (group, rows_q, rows_k))
        if wg_idx != PRODUCER:
            kv_head = quotient(head, group)
            query_block = i64(head) * (rows_q >> 7) + (tile[TILE_ROW] >> 7)
            key_block = i64(kv_head) * (rows_k >> 7) + (tile[TILE_OTHERS] >> 7)
            acc_o, acc_o_high, unit, softmax_state = consume(
                smem, tile, wg_idx,
                scale_inv_q + query_block * 4, scale_inv_k + key_block * 4, scale_inv_v + key_block * 4,
                left, right, c,
            )  # fmt: skip
            tile, head = tile_again(table, heads)
            lane = cuda.threadIdx.x & 31
            row_in_tile = warp * 16 + (lane >> 2)
            inverse, inverse_below, seen, seen_below = store_statistics(
                softmax_state, m, l, tile, head, rows_q, row_in_tile, lane
            )
            inverse, inverse_below = unit * inverse, unit * inverse_below
            strides = stride_b, stride_l, stride_h
            shared = smem + out_offset
            store(acc_o, inverse, inverse_below, seen, seen_below, shared, out, tile, head, warp, strides)
            if two_halves:
                store_high(acc_o_high, inverse, inverse_below, seen, seen_below, shared, out, tile, head, warp, strides)

    parameters = {
        **typed(tensor_map, "map_q map_k map_v"),
        **typed(i64, "table scale_inv_q scale_inv_k scale_inv_v out m l"),
        **typed(i32, "heads group rows_q rows_k left right"),
        "c": f32,
        **typed(i64, "stride_b stride_l stride_h"),
    }
    return attention_on_hopper(f"attention_forward({spec}, {stages=})", attention_forward, parameters, offsets)
