"""dQ of FP8 attention on Hopper: rows are queries; a producer warp copies with TMA, two warpgroups multiply.

A block has 128 queries of one head, 64 for each warpgroup, whose codes of Q and dO stay in shared memory, and walks
over the keys that they see, 128 at a time: K, V and transposed K lie in a ring of stages. Of each tile a warpgroup
computes S = Q Kᵀ and dP = dO Vᵀ, turns them into dS in registers, scales each row of it by 448 over its largest
magnitude, and multiplies it, from registers, with K. That product is added in float32 together with the scale, so that
the tensor cores' short accumulator (about 14 bits, DeepSeek-V3, arXiv:2412.19437) never sums more than 128 products.

While one warpgroup computes exponentials the other multiplies; nothing orders them. The rows of dS are summed up, too:
with exact numbers that is 0, and :mod:`.dkv` corrects D by it. Numerics: the reference's ``_dq``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.attention.backward.memory import (
    PRODUCER_REGISTERS,
    REGISTERS,
    THREADS,
    TILE,
    dq_offsets,
    dq_stages,
)
from cuda_kernels.attention.backward.statistics import (
    CODE_UNIT,
    CORRECTED,
    DELTA,
    GRADIENT_SCALE,
    LARGEST_CODE,
    NO_AMAX,
    QUERY_SCALE,
    SMALLEST,
    STATISTICS,
    TOTAL,
)
from cuda_kernels.attention.products import descriptor, make_product, make_register_product
from cuda_kernels.attention.softmax import quad_max, quad_sum
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES, make_row_store
from cuda_kernels.attention.tiles import load_tile
from cuda_kernels.device.fragments import (
    add_rows,
    exp2_rows,
    mask_rows,
    pack_a_words,
    rows_amax,
    rows_sum,
    scale_rows,
    scale_seen_rows,
    score_gradients_rows,
    zeros,
)
from cuda_kernels.device.language import cuda, device, f32, i32, i64, tensor_map
from cuda_kernels.device.ptx import dynamic_shared, float_max, load_f32, quotient, reciprocal_approx, store_f32
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    address_of,
    elect_sync,
    fence_mbarrier_init,
    grid_constant_params,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensormap,
    shfl_sync_0,
    tma_load,
    warpgroup_reg_alloc,
    warpgroup_reg_dealloc,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.kernel import Kernel

_ZERO = np.float32(0)


@cache
def attention_dq_kernel(spec: AttentionSpec) -> Kernel:
    """``dq`` of the reference's ``backward``, in ``spec.out``, and ``CORRECTED``.

    Parameters are the tensor maps of Q's, dO's, K's and V's codes and of the transposed ones of K; the addresses of the
    table of tiles, of the scales of K and V, of the statistics (:mod:`.statistics`) and of dq; the heads, how many of
    them share one of K and V, the packed rows of queries and of keys, the band's limits; the softmax scale times
    log2(e), which is positive, and the softmax scale; and the strides of dq in elements, from a sequence to the next, a
    row and a head.
    """
    assert spec.panels == 1, "sums of 256 channels do not fit into registers"
    stages, offsets = dq_stages(spec), dq_offsets(spec)
    head_dim = spec.head_dim
    q_offset, do_offset, k_offset, v_offset, kt_offset, out_offset, full_q, full, empty = (
        offsets[name] for name in ("q", "do", "k", "v", "kt", "out", "full_q", "full", "empty")
    )
    transposed_bytes = head_dim * 128
    item = 4 if spec.out == "float32" else 2
    scores_count, sums_count = ROWS // 2, head_dim // 2
    zero_scores, zero_sums = zeros(scores_count), zeros(sums_count)
    scores_of, products_of = make_product(ROWS, spec.k_steps), make_register_product(head_dim, ROWS // 32)
    scores_wait_1, scores_wait_0 = wgmma_wait(scores_count, 1), wgmma_wait(scores_count, 0)
    sums_wait_0 = wgmma_wait(sums_count, 0)
    hide, exp2, gradients_of = mask_rows(scores_count), exp2_rows(scores_count), score_gradients_rows(scores_count)
    amax_of, sum_of = rows_amax(scores_count), rows_sum(scores_count)
    scale, pack = scale_rows(scores_count), pack_a_words(scores_count, "e4m3")
    promote, finish, store_rows = add_rows(sums_count), scale_seen_rows(sums_count), make_row_store(head_dim, spec.out)
    next_stage, _ = stage_counters(stages)

    @device
    def produce(smem, maps, tile, head, kv_head, rows_q, rows_k):
        map_q, map_do, map_k, map_v, map_kt = maps
        row, keys, first, last = tile[0], tile[1], tile[2], tile[3]
        mbarrier_arrive_expect_tx(smem + full_q, 2 * TILE)
        tma_load(smem + q_offset, map_q, smem + full_q, 0, head * rows_q + row)
        tma_load(smem + do_offset, map_do, smem + full_q, 0, head * rows_q + row)
        stage_idx, phase = i32(0), i32(0)
        for j in range(first, last):
            barrier = smem + full + 8 * stage_idx
            key = keys + j * ROWS
            mbarrier_wait(smem + empty + 8 * stage_idx, phase ^ 1)
            mbarrier_arrive_expect_tx(barrier, 2 * TILE + transposed_bytes)
            tma_load(smem + k_offset + stage_idx * TILE, map_k, barrier, 0, kv_head * rows_k + key)
            tma_load(smem + v_offset + stage_idx * TILE, map_v, barrier, 0, kv_head * rows_k + key)
            tma_load(smem + kt_offset + stage_idx * transposed_bytes, map_kt, barrier, key, kv_head * head_dim)
            stage_idx, phase = next_stage(stage_idx, phase)

    @device
    def rounded(ds):
        """Words of an operand A: dS in units of its rows' scales; and these units."""
        amax, amax_below = amax_of(ds)
        amax, amax_below = float_max(quad_max(amax), NO_AMAX), float_max(quad_max(amax_below), NO_AMAX)
        scaled = scale(ds, LARGEST_CODE * reciprocal_approx(amax), LARGEST_CODE * reciprocal_approx(amax_below))
        return pack(scaled), amax * CODE_UNIT, amax_below * CODE_UNIT

    @device
    def consume(smem, tile, wg_idx, statistics, scale_k, scale_v, left, right):
        """dQ of this thread, without the softmax scale, and the sums of dS in its columns of both rows.

        ``statistics``: Q's scale times c, dO's, and of both rows the total and D.
        """
        _, _, first, last, whole_first, whole_last, count, diagonal, _, _, _, _ = tile
        query_factor, gradient_scale, total, total_below, delta, delta_below = statistics
        thread = cuda.threadIdx.x & 127
        lane = thread & 31
        row_in_tile = i32(wg_idx * 64 + (thread >> 5) * 16 + (lane >> 2))
        column = i32(2 * (lane & 3))
        lowest = i32(i32(diagonal + row_in_tile) - i32(left + column))
        highest = i32(i32(diagonal + row_in_tile) + i32(right - column))
        end = i32(i32(count - 1) - column)
        desc_q, desc_do = descriptor(smem + q_offset + wg_idx * 8192), descriptor(smem + do_offset + wg_idx * 8192)
        dq, rest, rest_below = zero_sums(), _ZERO, _ZERO
        next_key_scale, next_value_scale = np.float32(1), np.float32(1)
        if first < last:
            next_key_scale, next_value_scale = load_f32(scale_k + i64(first) * 4), load_f32(scale_v + i64(first) * 4)
        stage_idx, phase = i32(0), i32(0)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first, last):
            key_scale, value_scale = next_key_scale, next_value_scale
            # Coherent loads, which stay in front of the barriers: those of the next tile, a whole tile ahead.
            ahead = i64(min(i32(j + 1), i32(last - 1))) * 4
            next_key_scale, next_value_scale = load_f32(scale_k + ahead), load_f32(scale_v + ahead)
            mbarrier_wait(smem + full + 8 * stage_idx, phase)
            wgmma_fence()
            scores = scores_of(zero_scores(), desc_q, descriptor(smem + k_offset + stage_idx * TILE), 0)
            dp = scores_of(zero_scores(), desc_do, descriptor(smem + v_offset + stage_idx * TILE), 0)
            scores = scores_wait_1(scores)
            if j < whole_first or j >= whole_last:
                start = i32(j * ROWS)
                scores = hide(
                    scores,
                    i32(lowest - start), i32(min(highest, end) - start),
                    i32(i32(lowest + 8) - start), i32(min(i32(highest + 8), end) - start),
                )  # fmt: skip
            p = exp2(scores, float_max(query_factor * key_scale, SMALLEST), -total, -total_below)
            dp = scores_wait_0(dp)
            ds = gradients_of(dp, p, gradient_scale * value_scale, delta, delta_below)
            more, more_below = sum_of(ds)
            rest, rest_below = rest + more, rest_below + more_below
            words, unit, unit_below = rounded(ds)
            wgmma_fence()
            part = products_of(zero_sums(), words, descriptor(smem + kt_offset + stage_idx * transposed_bytes), 0)
            part = sums_wait_0(part)
            if thread == 0:
                mbarrier_arrive(smem + empty + 8 * stage_idx)
            dq = promote(dq, part, unit * key_scale, unit_below * key_scale)
            stage_idx, phase = next_stage(stage_idx, phase)
        return dq, rest, rest_below

    def attention_dq(
        map_q, map_do, map_k, map_v, map_kt, table, scale_k, scale_v, statistics, out,
        heads, group, rows_q, rows_k, left, right, c, softmax_scale, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        grid_constant_params()
        maps = address_of(map_q), address_of(map_do), address_of(map_k), address_of(map_v), address_of(map_kt)
        smem = dynamic_shared()
        wg_idx, warp = shfl_sync_0(cuda.threadIdx.x >> 7), shfl_sync_0(cuda.threadIdx.x >> 5)
        if cuda.threadIdx.x == 0:
            for index in range(5):
                prefetch_tensormap(maps[index])
            mbarrier_init(smem + full_q, 1)
            for stage in range(stages):
                mbarrier_init(smem + full + 8 * stage, 1)
                mbarrier_init(smem + empty + 8 * stage, 2)
            fence_mbarrier_init()
        cuda.syncthreads()
        tile_idx = quotient(cuda.blockIdx.x, heads)
        head = i32(cuda.blockIdx.x - tile_idx * heads)
        kv_head = quotient(head, group)
        tile = load_tile(table, tile_idx)
        if wg_idx == 2:
            warpgroup_reg_dealloc(PRODUCER_REGISTERS)
            if warp == 8 and elect_sync():
                produce(smem, maps, tile, head, kv_head, rows_q, rows_k)
        else:
            warpgroup_reg_alloc(REGISTERS)
            row, keys, _, _, _, _, _, _, valid, sequence, out_row, out_rows = tile
            lane, warp_row = cuda.threadIdx.x & 31, warp * 16
            mine = statistics + (i64(head) * STATISTICS * rows_q + row + warp_row + (lane >> 2)) * 4
            line = i64(rows_q) * 4
            delta, delta_below = load_f32(mine + DELTA * line), load_f32(mine + DELTA * line + 32)
            known = (
                load_f32(mine + QUERY_SCALE * line) * c, load_f32(mine + GRADIENT_SCALE * line),
                load_f32(mine + TOTAL * line), load_f32(mine + TOTAL * line + 32), delta, delta_below,
            )  # fmt: skip
            key_block = (i64(kv_head) * (rows_k >> 7) + (keys >> 7)) * 4
            dq, rest, rest_below = consume(
                smem, tile, wg_idx, known, scale_k + key_block, scale_v + key_block, left, right
            )
            rest, rest_below = quad_sum(rest), quad_sum(rest_below)
            if lane & 3 == 0:
                store_f32(mine + CORRECTED * line, delta + rest)
                store_f32(mine + CORRECTED * line + 32, delta_below + rest_below)
            place = (i64(sequence) * stride_b + i64(out_row + warp_row) * stride_l + i64(head) * stride_h) * item
            shared = smem + out_offset + warp * WARP_BYTES
            inside, inside_below = warp_row + (lane >> 2) < valid, warp_row + (lane >> 2) + 8 < valid
            dq = finish(dq, softmax_scale, softmax_scale, inside, inside_below)
            store_rows(dq, shared, out + place, stride_l * item, out_rows - warp_row, lane)

    return Kernel(
        f"attention_dq({spec}, {stages=})",
        attention_dq,
        (*[tensor_map] * 5, *[i64] * 5, *[i32] * 6, f32, f32, *[i64] * 3),
        THREADS,
        shared_bytes=offsets["end"],
        architectures=("90a",),
    )
