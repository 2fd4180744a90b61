"""dK or dV of heads with 256 channels on Hopper: rows are keys; scales and flushes are those of :mod:`.dkv`.

Sums of 256 channels take 128 registers per thread, so only one of dK and dV fits. Each has its own launch, which
recomputes the probabilities: 10 products of 64 by 64 by 256 instead of 8. If two warpgroups shared the channels of
both, there would be 12, with twice the reads for each.

A block processes 128 keys, 64 per warpgroup. The codes of 128 queries take 32 KB per copy. Q, for dK also dO, and a
transposed copy share the stages of a ring of :data:`WIDE_STAGES`, each refilled as soon as it is empty.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from cuda_kernels.attention.backward.dkv import DkvTiles, dkv_of_tiles, make_stage_statistics
from cuda_kernels.attention.backward.memory import (
    FLUSH,
    QUERIES,
    STATISTICS_BYTES,
    WIDE_STAGES,
    WIDE_TILE,
    scratch_floats,
    wide_dkv_offsets,
)
from cuda_kernels.attention.backward.running_scale import START, make_running_rows
from cuda_kernels.attention.backward.statistics import CORRECTED, SMALLEST, TOTAL
from cuda_kernels.attention.block import HALF_TILE, TILE, fill_stage, init_ring, make_row_load
from cuda_kernels.attention.products import found_again, make_product, make_register_product
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.stores import make_gradient_store
from cuda_kernels.attention.tiles import block_index, make_band_mask, visible_columns, visited_tiles
from cuda_kernels.attention.warp_roles import MULTIPLYING, accumulator_origin
from cuda_kernels.device.fragments import exp2_columns, rows_amax, score_gradients_columns, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import float_max
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
    shfl_sync_0,
    syncwarp,
    tma_load,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import advance_descriptor, smem_descriptor
from cuda_kernels.kernel import Kernel

_ONE = np.float32(1)


@cache
def attention_dkv_256_kernel(spec: AttentionSpec, result: Literal["dk", "dv"], flush: int = FLUSH) -> Kernel:
    """``dk`` or ``dv`` of the reference's ``backward``, in ``spec.out_dtype``.

    Parameters are those of :func:`.dkv.attention_dkv_kernel`. Only ``result`` is written; for dV, inputs that only dK
    depends on are not read.

    Args:
        spec: compile-time options.
        result: the gradient that the kernel computes.
        flush: a multiple of 128; see :data:`FLUSH`.
    """
    assert spec.head_dim == 256
    assert flush % ROWS == 0
    is_dk = result == "dk"
    offsets = wide_dkv_offsets()
    k_offset, v_offset, ring, statistics_offset, full_kv, full, empty = (
        offsets[name] for name in ("k", "v", "ring", "statistics", "full_kv", "full", "empty")
    )
    own_bytes = 2 * WIDE_TILE if is_dk else WIDE_TILE
    scores_count, sums_count = QUERIES // 2, 128
    flush_steps, copies = flush // ROWS, 3 if is_dk else 2
    block_floats = scratch_floats(spec)
    sums_floats = MULTIPLYING * sums_count if is_dk else 0
    zero_scores, zero_sums = zeros(scores_count), zeros(sums_count)
    scores_of, add_products = make_product(QUERIES, 4, 2), make_register_product(256, QUERIES // 32)
    scores_wait_1, scores_wait_0 = wgmma_wait(scores_count, 1), wgmma_wait(scores_count, 0)
    sums_wait_0 = wgmma_wait(sums_count, 0)
    hide, exp2 = make_band_mask(scores_count), exp2_columns(scores_count)
    gradients_of, amax_of = score_gradients_columns(scores_count), rows_amax(scores_count)
    rounded, leave, finished, come_back = make_running_rows(scores_count, sums_count, MULTIPLYING, early=not is_dk)
    load_statistics, statistic, scales_of = make_stage_statistics(statistics_offset)
    load_rows, store_rows = make_row_load(2), make_gradient_store(256, spec.out_dtype)
    next_stage = stage_counters(WIDE_STAGES)

    @device
    def init_rings(smem):
        init_ring(smem + full, smem + empty, WIDE_STAGES, MULTIPLYING // 32)

    @device
    def scratch_of(scratch):
        """Address of this thread's sums in scratch memory. Computed on use, to save registers in the loop."""
        return scratch + (i64(shfl_sync_0(block_index())) * block_floats + sums_floats + cuda.threadIdx.x) * 4

    @device
    def produce(smem, maps, tile, kv_head, shape):
        group, rows_q, rows_k = shape
        map_k, map_v, map_q, map_do, map_qt, map_dot, map_statistics = maps
        map_t = map_qt if is_dk else map_dot
        packed_row, queries = tile[TILE_ROW], tile[TILE_OTHERS]
        first_tile, last_tile = tile[TILE_FIRST], tile[TILE_LAST]
        mbarrier_arrive_expect_tx(smem + full_kv, own_bytes)
        load_rows(smem + k_offset, map_k, smem + full_kv, kv_head * rows_k + packed_row)
        if is_dk:
            load_rows(smem + v_offset, map_v, smem + full_kv, kv_head * rows_k + packed_row)
        stage_idx, phase = i32(0), i32(0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            i, end = i32(first_tile >> 1), i32((last_tile + 1) >> 1)
            while i < end:  # see attention_dkv
                query = queries + i * ROWS
                barrier = smem + full + 8 * stage_idx
                fill_stage(barrier, smem + empty + 8 * stage_idx, phase, WIDE_TILE + STATISTICS_BYTES)
                load_rows(smem + ring + stage_idx * WIDE_TILE, map_q, barrier, head * rows_q + query)
                load_statistics(smem, map_statistics, barrier, stage_idx, query, head)
                stage_idx, phase = next_stage(stage_idx, phase)
                if is_dk:
                    barrier = smem + full + 8 * stage_idx
                    fill_stage(barrier, smem + empty + 8 * stage_idx, phase, WIDE_TILE)
                    load_rows(smem + ring + stage_idx * WIDE_TILE, map_do, barrier, head * rows_q + query)
                    stage_idx, phase = next_stage(stage_idx, phase)
                barrier = smem + full + 8 * stage_idx
                fill_stage(barrier, smem + empty + 8 * stage_idx, phase, WIDE_TILE)
                tma_load(smem + ring + stage_idx * WIDE_TILE, map_t, barrier, query, head * 256)
                tma_load(smem + ring + stage_idx * WIDE_TILE + TILE, map_t, barrier, query, head * 256 + 128)
                stage_idx, phase = next_stage(stage_idx, phase)
                i = found_again(i32(i + 1))

    @device
    def consume(smem, tile, wg_idx, key_factor, value_scale_inv, group, left, right, scratch):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        own = i32(smem + k_offset + wg_idx * HALF_TILE)
        sums, limits = zero_sums(), (START, START)
        steps, flushed = i32(0), i32(0)
        mbarrier_wait(smem + full_kv, 0)
        for _ in range(group):
            for i in range(first_tile >> 1, (last_tile + 1) >> 1):
                if steps - flushed == flush_steps:
                    leave(sums, limits, scratch_of(scratch), flushed == 0)
                    sums, flushed = zero_sums(), steps
                fill = i32(steps * copies)
                q_stage, do_stage, t_stage = i32(fill & 3), i32((fill + 1) & 3), i32((fill + copies - 1) & 3)
                mbarrier_wait(smem + full + 8 * q_stage, fill >> 2 & 1)
                if is_dk:
                    mbarrier_wait(smem + full + 8 * do_stage, (fill + 1) >> 2 & 1)
                for half in range(2):
                    of_rows = half * (QUERIES * 128)
                    desc_k = smem_descriptor(found_again(own))
                    desc_v = advance_descriptor(desc_k, WIDE_TILE)
                    wgmma_fence()
                    scores = scores_of(
                        zero_scores(), desc_k, smem_descriptor(smem + ring + q_stage * WIDE_TILE + of_rows), 0
                    )
                    dp = zero_scores()
                    if is_dk:
                        dp = scores_of(dp, desc_v, smem_descriptor(smem + ring + do_stage * WIDE_TILE + of_rows), 0)
                    query = i32(half * QUERIES + col_in_tile)
                    query_scale_inv, gradient_scale_inv = scales_of(smem, q_stage, query)
                    scores = scores_wait_1(scores) if is_dk else scores_wait_0(scores)
                    if 2 * i + half < whole_first or 2 * i + half >= whole_last:
                        scores = hide(scores, visible, i32(i * ROWS + half * QUERIES))
                    factor = float_max(key_factor * query_scale_inv, SMALLEST)
                    p_or_ds = exp2(scores, factor, statistic(smem, q_stage, TOTAL, query))
                    its_factor = gradient_scale_inv
                    if is_dk:
                        corrected = statistic(smem, q_stage, CORRECTED, query)
                        p_or_ds = gradients_of(
                            scores_wait_0(dp), p_or_ds, value_scale_inv * gradient_scale_inv, corrected
                        )
                        its_factor = query_scale_inv
                    amax, amax_below = amax_of(p_or_ds)
                    words, sums, limits = rounded(p_or_ds, amax, amax_below, its_factor, sums, limits)
                    mbarrier_wait(smem + full + 8 * t_stage, (fill + copies - 1) >> 2 & 1)
                    wgmma_fence()
                    desc_t = smem_descriptor(smem + ring + t_stage * WIDE_TILE + half * QUERIES)
                    sums = sums_wait_0(add_products(sums, words, desc_t, 1))
                syncwarp()  # the warp's lanes have read the statistics
                if cuda.threadIdx.x & 31 == 0:
                    mbarrier_arrive(smem + empty + 8 * q_stage)
                    if is_dk:
                        mbarrier_arrive(smem + empty + 8 * do_stage)
                    mbarrier_arrive(smem + empty + 8 * t_stage)
                steps += 1
        sums = finished(sums, limits)
        if flushed:
            sums = come_back(sums, scratch_of(scratch))
        return sums

    @device
    def store(sums, softmax_scale, shared, dk_out, dv_out, tile, head, warp, strides):
        factor, out = (softmax_scale, dk_out) if is_dk else (_ONE, dv_out)
        store_rows(sums, factor, shared, out, tile, head, warp, strides)

    tiles = DkvTiles(offsets, init_rings, produce, consume, store)
    return dkv_of_tiles(spec, "attention_dkv_256", f"attention_{result}({spec}, stages={WIDE_STAGES}, {flush=})", tiles)
