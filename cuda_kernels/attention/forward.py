"""FP8 attention's forward pass on Hopper: a producer warp copies with TMA, two warpgroups multiply in turns.

A block processes 128 queries of one head, 64 per warpgroup, and loops over the keys they attend to, 128 at a time.
Codes of K and transposed V are in a ring of stages in shared memory. Each stage has a ``full`` barrier, which counts
the bytes written by TMA, and an ``empty`` barrier for the two warpgroups that read it. For each tile a warpgroup
computes S = Q Kᵀ, and turns S into P in registers, which is directly the left operand of P V. The product is added in
float32 by the instruction that rescales the sum, so that the tensor cores' short accumulator (about 14 bits,
DeepSeek-V3, arXiv:2412.19437) never sums more than 128 products. :mod:`.forward_tiles` schedules
the warpgroups' other work.

The numerics are those of the reference's ``forward``: the scales of Q and K are part of the factor of the scores; V's
scale is the unit of the sums, so it changes by a factor of the whole sum.
"""

from __future__ import annotations

from functools import cache

from cuda_kernels.attention.block import (
    PRODUCER,
    TILE,
    attention_on_hopper,
    fill_stage,
    init_ring,
    make_row_load,
    make_warp_specialized,
)
from cuda_kernels.attention.forward_tiles import forward_offsets, forward_stages, make_forward_tiles
from cuda_kernels.attention.softmax import store_statistics
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.tiles import parameters_of_pass, tile_again
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import dynamic_shared, quotient
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import address_of, mbarrier_arrive_expect_tx, mbarrier_init, tma_load
from cuda_kernels.kernel import Kernel


@cache
def attention_forward_kernel(spec: AttentionSpec) -> Kernel:
    """``o`` and the statistics ``m`` and ``l`` of the reference's ``forward``.

    Parameters are the tensor maps of Q, K and transposed V (layouts: :mod:`.spec`); the addresses of the table of
    tiles, of the ``scale_inv`` of Q, K and V, of out, m and l; the number of heads at once, and of query heads
    per head of K and V, the packed rows of queries and of keys, the band's limits; the softmax scale times log2(e),
    which is positive; and the strides of out in elements, between sequences, rows and heads. The grid is that of
    :func:`.tiles.tile_of`.
    """
    stages, offsets = forward_stages(spec), forward_offsets(spec)
    head_dim = spec.head_dim
    q_offset, k_offset, v_offset, out_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "out", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    q_bytes, k_bytes, v_bytes = spec.panels * TILE, spec.panels * TILE, head_dim * 128
    consume, store = make_forward_tiles(spec)
    load_rows = make_row_load(spec.panels)
    next_stage = stage_counters(stages)

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

    def attention_forward(
        map_q, map_k, map_v, table, scale_inv_q, scale_inv_k, scale_inv_v, out, m, l,  # noqa: E741
        heads_at_once, group, rows_q, rows_k, left, right, c, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        maps = address_of(map_q), address_of(map_k), address_of(map_v)
        smem = dynamic_shared()
        tile, head, wg_idx, warp = begin(smem, maps, table, heads_at_once, (group, rows_q, rows_k))
        if wg_idx != PRODUCER:
            kv_head = quotient(head, group)
            query_block = i64(head) * (rows_q >> 7) + (tile[TILE_ROW] >> 7)
            key_block = i64(kv_head) * (rows_k >> 7) + (tile[TILE_OTHERS] >> 7)
            sums, unit, softmax_state = consume(
                smem, tile, wg_idx,
                scale_inv_q + query_block * 4, scale_inv_k + key_block * 4, scale_inv_v + key_block * 4,
                left, right, c,
            )  # fmt: skip
            tile, head = tile_again(table, heads_at_once)
            lane = cuda.threadIdx.x & 31
            row_in_tile = warp * 16 + (lane >> 2)
            inverse, inverse_below, seen, seen_below = store_statistics(
                softmax_state, m, l, tile, head, rows_q, row_in_tile, lane
            )
            inverse, inverse_below = unit * inverse, unit * inverse_below
            strides = stride_b, stride_l, stride_h
            shared = smem + out_offset
            store(sums, inverse, inverse_below, seen, seen_below, shared, out, tile, head, warp, strides)

    parameters = parameters_of_pass("map_q map_k map_v", "table scale_inv_q scale_inv_k scale_inv_v out m l", "c")
    return attention_on_hopper(f"attention_forward({spec}, {stages=})", attention_forward, parameters, offsets)
