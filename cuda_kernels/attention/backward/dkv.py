"""dK and dV of FP8 attention on Hopper: rows are keys; a producer warp copies with TMA, two warpgroups multiply.

A block processes 128 keys of one head, 64 per warpgroup. Their codes of K and V stay in shared memory. It loops over
the queries that attend to them, in all heads of the group, so that no two blocks add to the same result. Codes of Q and
dO, both also transposed, and their statistics are in a ring of stages of 128 queries. For each 64 queries a warpgroup
computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, turns them into Pᵀ and dSᵀ in registers, and multiplies these, from registers, with
dO and Q. While one warpgroup computes exponentials the other multiplies; they are not synchronized.

A tile's product of dSᵀ and Q is issued with the next tile's scores, and overlaps with the exponentials of that tile. So
no product is in flight at the end of a tile; otherwise the assembler would insert a wait after each product (its advice
C7513). Therefore transposed Q is read longer than the rest of its stage, and has a ring of its own.

**Scales.** A row of Pᵀ, times dO's scale, has one scale for all tiles, which changes only when the row exceeds its
range (:mod:`.running_scale`); so does dSᵀ times Q's scale. Therefore the tensor cores can accumulate over tiles. Adding
each tile in float32, as in :mod:`.dq`, would cost four instructions per score, and more registers than there are.

**Accumulation.** The tensor cores' accumulator keeps about 14 bits (DeepSeek-V3, arXiv:2412.19437). Modelled as 13
fractional bits, truncated, sums of equal sign shrink by up to 1 % in 1024 products and by 12 % in 16,384. So after each
:data:`FLUSH` queries they are added to float32 sums in global memory, private to the thread: results are deterministic.
The interval is 1024 because the tensor cores take some 16,000 cycles for it, and the 128 KB of a block some thousand.

**With 256 channels** the sums take 128 registers per thread, so only one of dK and dV fits. Each has its own launch,
which recomputes the probabilities: 10 products of 64 by 64 by 256 instead of 8. If two warpgroups shared the channels
of both, there would be 12, with twice the reads for each. The codes of 128 queries take 32 KB per copy. Q, for dK also
dO, and a transposed copy share the stages of a ring of :data:`.memory.WIDE_STAGES`, each refilled as soon as it is
empty.

Numerics: the reference's ``_dk_dv``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np

from cuda_kernels.attention.backward.memory import (
    FLUSH,
    LINE,
    QUERIES,
    STATISTICS_BYTES,
    WIDE_STAGES,
    WIDE_TILE,
    dkv_offsets,
    dkv_stages,
    scratch_floats,
    wide_dkv_offsets,
)
from cuda_kernels.attention.backward.running_scale import START, make_running_rows
from cuda_kernels.attention.backward.statistics import (
    CORRECTED,
    GRADIENT_SCALE_INV,
    QUERY_SCALE_INV,
    SMALLEST,
    STATISTICS,
    TOTAL,
)
from cuda_kernels.attention.block import (
    HALF_TILE,
    MULTIPLYING,
    PRODUCER,
    TILE,
    accumulator_origin,
    attention_on_hopper,
    fill_stage,
    init_ring,
    make_own_load,
    make_row_load,
    make_warp_specialized,
)
from cuda_kernels.attention.products import found_again, make_product, make_register_product, thread_again
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.stores import make_gradient_store
from cuda_kernels.attention.tiles import (
    block_index,
    make_band_mask,
    parameters_of_pass,
    tile_again,
    visible_columns,
    visited_tiles,
)
from cuda_kernels.device.fragments import (
    exp2_columns,
    pack_a_words,
    rows_amax,
    rows_max,
    score_gradients_columns,
    zeros,
)
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import dynamic_shared, float_max, from_bits, load_f32, shared_load_4
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    address_of,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
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
def make_stage_statistics(offset: int) -> tuple[Any, Any, Any]:
    """Device functions for the statistics of 128 queries in a stage; the first stage's are at ``offset``.

    The first, ``(smem, tensor, barrier, stage_idx, query, head)``, starts to copy them, from packed row ``query`` on.
    The second, ``(smem, stage_idx, which, query)``, is the address of a statistic of query ``query`` of the stage. The
    third, ``(smem, stage_idx, query)``, gives Q's and dO's ``scale_inv``.
    """

    @device
    def place(stage_idx, which, query):
        return i32(offset + stage_idx * STATISTICS_BYTES + (which - CORRECTED) * LINE + 4 * query)

    @device
    def load(smem, tensor, barrier, stage_idx, query, head):
        tma_load(smem + place(stage_idx, CORRECTED, 0), tensor, barrier, query, head * STATISTICS + CORRECTED)

    @device
    def statistic_address(smem, stage_idx, which, query):
        return smem + place(stage_idx, which, query)

    @device
    def scales(smem, stage_idx, query):
        return (
            from_bits(shared_load_4(smem + place(stage_idx, QUERY_SCALE_INV, query))),
            from_bits(shared_load_4(smem + place(stage_idx, GRADIENT_SCALE_INV, query))),
        )

    return load, statistic_address, scales


def _dkv_pass(
    spec: AttentionSpec, function_name: str, variant: str, offsets: dict[str, int],
    init_rings: Any, produce: Any, consume: Any, store: Any,
) -> Kernel:  # fmt: skip
    """The kernel for dK and dV, or one of them; see :func:`attention_dkv_kernel` for its parameters.

    Args:
        spec: compile-time options.
        function_name: name of the kernel's function, shown by profilers.
        variant: the kernel's name.
        offsets: the offsets of the block's buffers in shared memory, including ``out``.
        init_rings: a device function of shared memory's address that initializes the rings' barriers.
        produce: a device function ``(smem, maps, tile, kv_head, shape)`` for the thread that copies.
        consume: a device function ``(smem, tile, wg_idx, key_factor, value_scale_inv, group, left, right, scratch) ->
            sums`` of this thread, without the softmax scale. ``key_factor``: K's ``scale_inv`` times c.
        store: a device function ``(sums, softmax_scale, shared, dk_out, dv_out, tile, head, warp, strides)``.
    """
    out_offset, full_kv = offsets["out"], offsets["full_kv"]
    wide = spec.panels > 1

    @device
    def init_barriers(smem):
        mbarrier_init(smem + full_kv, 1)
        init_rings(smem)

    begin = make_warp_specialized(init_barriers, produce)

    def attention_dkv(
        map_k, map_v, map_q, map_do, map_qt, map_dot, map_statistics,
        table, scale_inv_k, scale_inv_v, dk_out, dv_out, scratch,
        heads_at_once, group, rows_q, rows_k, left, right, c, softmax_scale, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        maps = (
            address_of(map_k), address_of(map_v), address_of(map_q), address_of(map_do), address_of(map_qt),
            address_of(map_dot), address_of(map_statistics),
        )  # fmt: skip
        smem = dynamic_shared()
        tile, head, wg_idx, warp = begin(smem, maps, table, heads_at_once, (group, rows_q, rows_k))
        if wg_idx != PRODUCER:
            block = (i64(head) * (rows_k >> 7) + (tile[TILE_ROW] >> 7)) * 4
            key_factor, value_scale_inv = load_f32(scale_inv_k + block) * c, load_f32(scale_inv_v + block)
            sums = consume(smem, tile, wg_idx, key_factor, value_scale_inv, group, left, right, scratch)
            if wide:
                tile, head = tile_again(table, heads_at_once)
            strides = stride_b, stride_l, stride_h
            store(sums, softmax_scale, smem + out_offset, dk_out, dv_out, tile, head, warp, strides)

    attention_dkv.__name__ = attention_dkv.__qualname__ = function_name
    parameters = parameters_of_pass(
        "map_k map_v map_q map_do map_qt map_dot map_statistics",
        "table scale_inv_k scale_inv_v dk_out dv_out scratch",
        "c softmax_scale",
    )
    return attention_on_hopper(variant, attention_dkv, parameters, offsets)


@cache
def attention_dkv_kernel(spec: AttentionSpec, flush: int = FLUSH) -> Kernel:
    """``dk`` and ``dv`` of the reference's ``backward``, in ``spec.out_dtype``.

    Parameters are the tensor maps of K's, V's, Q's and dO's codes, of the transposed codes of Q and dO, and of the
    statistics, float32 ``[H 5, R]`` (:mod:`.statistics`), in boxes of 4 by 128; the addresses of the table of tiles of
    keys, with queries in tiles of 64, of the ``scale_inv`` of K and V, of dk, dv and :func:`scratch_floats` per block;
    the number of heads of keys at once, and of query heads per head of keys, the packed rows of queries and of keys,
    the limits of the band of queries that attend to a key; the softmax scale times log2(e), which is positive, and the
    softmax scale; and the strides of dk and dv in elements, between sequences, rows and heads. The grid is that of
    :func:`cuda_kernels.attention.tiles.tile_of`.

    Args:
        spec: compile-time options.
        flush: a multiple of 128; see :data:`FLUSH`.
    """
    assert spec.panels == 1, "sums of 256 channels do not fit into registers"
    assert flush % ROWS == 0
    stages, offsets = dkv_stages(spec), dkv_offsets(spec)
    head_dim = spec.head_dim
    k_offset, v_offset, full_kv = (offsets[name] for name in ("k", "v", "full_kv"))
    q_offset, do_offset, qt_offset, dot_offset, statistics_offset, full, empty, full_qt, empty_qt = (
        offsets[name] for name in ("q", "do", "qt", "dot", "statistics", "full", "empty", "full_qt", "empty_qt")
    )
    transposed_bytes = head_dim * 128
    stage_bytes = 2 * TILE + transposed_bytes + STATISTICS_BYTES
    scores_count, sums_count = QUERIES // 2, head_dim // 2
    flush_stages = flush // ROWS
    dk_scratch = 4 * MULTIPLYING * sums_count
    block_floats = scratch_floats(spec)
    zero_scores, zero_sums = zeros(scores_count), zeros(sums_count)
    scores_of, add_products = make_product(QUERIES, spec.k_steps), make_register_product(head_dim, QUERIES // 32)
    scores_wait_2, scores_wait_1 = wgmma_wait(scores_count, 2), wgmma_wait(scores_count, 1)
    sums_wait_1, sums_wait_0 = wgmma_wait(sums_count, 1), wgmma_wait(sums_count, 0)
    hide, exp2 = make_band_mask(scores_count), exp2_columns(scores_count)
    gradients_of, max_of, amax_of = (make(scores_count) for make in (score_gradients_columns, rows_max, rows_amax))
    codes_of = pack_a_words(scores_count, "e4m3")
    rounded, leave, finished, come_back = make_running_rows(scores_count, sums_count, MULTIPLYING)
    load_statistics, statistic, scales_of = make_stage_statistics(statistics_offset)
    load_own = make_own_load(spec.panels)
    store_dv = make_gradient_store(head_dim, spec.out_dtype)
    store_dk = make_gradient_store(head_dim, spec.out_dtype, again=True)
    next_stage = stage_counters(stages)

    @device
    def init_rings(smem):
        init_ring(smem + full, smem + empty, stages, MULTIPLYING // 32)
        init_ring(smem + full_qt, smem + empty_qt, stages, 2)

    @device
    def produce(smem, maps, tile, kv_head, shape):
        group, rows_q, rows_k = shape
        map_k, map_v, map_q, map_do, map_qt, map_dot, map_statistics = maps
        packed_row, queries = tile[TILE_ROW], tile[TILE_OTHERS]
        first_tile, last_tile = tile[TILE_FIRST], tile[TILE_LAST]
        load_own(smem + k_offset, map_k, smem + v_offset, map_v, smem + full_kv, kv_head * rows_k + packed_row)
        stage_idx, phase = i32(0), i32(0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            i, end = i32(first_tile >> 1), i32((last_tile + 1) >> 1)
            while i < end:  # not a range, which is unrolled: addresses would not fit into the producer's registers
                barrier = smem + full + 8 * stage_idx
                query = queries + i * ROWS
                fill_stage(barrier, smem + empty + 8 * stage_idx, phase, stage_bytes)
                tma_load(smem + q_offset + stage_idx * TILE, map_q, barrier, 0, head * rows_q + query)
                tma_load(smem + do_offset + stage_idx * TILE, map_do, barrier, 0, head * rows_q + query)
                load_statistics(smem, map_statistics, barrier, stage_idx, query, head)
                tma_load(smem + dot_offset + stage_idx * transposed_bytes, map_dot, barrier, query, head * head_dim)
                barrier = smem + full_qt + 8 * stage_idx
                fill_stage(barrier, smem + empty_qt + 8 * stage_idx, phase, transposed_bytes)
                tma_load(smem + qt_offset + stage_idx * transposed_bytes, map_qt, barrier, query, head * head_dim)
                stage_idx, phase = next_stage(stage_idx, phase)
                i = found_again(i32(i + 1))

    @device
    def no_codes():
        return codes_of(zero_scores())

    @device
    def scratch_of(scratch):
        """Address of this thread's sums in scratch memory. Computed on use, to save registers in the loop."""
        return scratch + (i64(block_index()) * block_floats + thread_again()) * 4

    @device
    def consume(smem, tile, wg_idx, key_factor, value_scale_inv, group, left, right, scratch):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        own = wg_idx * HALF_TILE
        desc_k, desc_v = smem_descriptor(smem + k_offset + own), smem_descriptor(smem + v_offset + own)
        dv, dk = zero_sums(), zero_sums()
        p_limits, ds_limits = (START, START), (START, START)
        accumulated, more = i32(0), i32(0)
        stage_idx, phase = i32(0), i32(0)
        # dK's product with the codes of the last tile's dS is delayed to the next tile; before the first, they are 0.
        late, late_stage, late_columns = no_codes(), i32(-1), i32(0)
        mbarrier_wait(smem + full_kv, 0)
        first_stage, end_stage = i32(first_tile >> 1), i32((last_tile + 1) >> 1)
        for _ in range(group):
            for i in range(first_stage, end_stage):
                if accumulated == flush_stages:  # dK lacks the last tile's product, which starts its next sums
                    leave(dv, p_limits, scratch_of(scratch), more == 0)
                    leave(dk, ds_limits, scratch_of(scratch) + dk_scratch, more == 0)
                    dv, dk = zero_sums(), zero_sums()
                    accumulated, more = i32(0), i32(1)
                mbarrier_wait(smem + full + 8 * stage_idx, phase)
                mbarrier_wait(smem + full_qt + 8 * stage_idx, phase)
                for half in range(i32(0), i32(2)):
                    of_rows = stage_idx * TILE + half * (QUERIES * 128)
                    of_columns = i32(stage_idx * transposed_bytes + half * QUERIES)
                    wgmma_fence()
                    scores = scores_of(zero_scores(), desc_k, smem_descriptor(smem + q_offset + of_rows), 0)
                    dk = add_products(dk, late, smem_descriptor(smem + qt_offset + late_columns), 1)
                    dp = scores_of(zero_scores(), desc_v, smem_descriptor(smem + do_offset + of_rows), 0)
                    query = i32(half * QUERIES + col_in_tile)
                    query_scale_inv, gradient_scale_inv = scales_of(smem, stage_idx, query)
                    scores = scores_wait_2(scores)
                    tile_idx = i32(2 * i + half)
                    if tile_idx < whole_first or tile_idx >= whole_last:
                        scores = hide(scores, visible, i32(i * ROWS + half * QUERIES))
                    factor = float_max(key_factor * query_scale_inv, SMALLEST)
                    p = exp2(scores, factor, statistic(smem, stage_idx, TOTAL, query))
                    amax, amax_below = max_of(p)
                    words, dv, p_limits = rounded(p, amax, amax_below, gradient_scale_inv, dv, p_limits)
                    wgmma_fence()
                    dv = add_products(dv, words, smem_descriptor(smem + dot_offset + of_columns), 1)
                    dp, dk = scores_wait_1(dp), sums_wait_1(dk)
                    if half == 0 and late_stage >= 0 and cuda.threadIdx.x & 127 == 0:
                        mbarrier_arrive(smem + empty_qt + 8 * late_stage)
                    corrected = statistic(smem, stage_idx, CORRECTED, query)
                    ds = gradients_of(dp, p, value_scale_inv * gradient_scale_inv, corrected)
                    amax, amax_below = amax_of(ds)
                    late, dk, ds_limits = rounded(ds, amax, amax_below, query_scale_inv, dk, ds_limits)
                    late_columns = of_columns
                    dv = sums_wait_0(dv)
                syncwarp()  # the warp's lanes have read the statistics
                if cuda.threadIdx.x & 31 == 0:
                    mbarrier_arrive(smem + empty + 8 * stage_idx)
                late_stage = stage_idx
                stage_idx, phase = next_stage(stage_idx, phase)
                accumulated += 1
        if late_stage >= 0:
            wgmma_fence()
            dk = sums_wait_0(add_products(dk, late, smem_descriptor(smem + qt_offset + late_columns), 1))
        dv, dk = finished(dv, p_limits), finished(dk, ds_limits)
        if more:
            dv, dk = come_back(dv, scratch_of(scratch)), come_back(dk, scratch_of(scratch) + dk_scratch)
        return dv, dk

    @device
    def store(sums, softmax_scale, shared, dk_out, dv_out, tile, head, warp, strides):
        dv, dk = sums
        store_dv(dv, _ONE, shared, dv_out, tile, head, warp, strides)
        store_dk(dk, softmax_scale, shared, dk_out, tile, head, warp, strides)

    name = f"attention_dkv({spec}, {stages=}, {flush=})"
    return _dkv_pass(spec, "attention_dkv", name, offsets, init_rings, produce, consume, store)


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

    name = f"attention_{result}({spec}, stages={WIDE_STAGES}, {flush=})"
    return _dkv_pass(spec, "attention_dkv_256", name, offsets, init_rings, produce, consume, store)
