"""dK and dV of FP8 attention without wgmma: rows are keys; eight warps, with 16 keys each, share tiles of queries.

A block processes 128 keys of one head. Their codes of K and V stay in shared memory. It loops over the queries that
attend to them, 64 at a time, in all heads of the group, so that no two blocks add to the same result. Codes of Q and
dO, both also transposed, and their statistics are in a ring of two stages: one tile is copied while the other is
multiplied. A line of a transposed copy has both stages' queries, 64 bytes each. For each tile a warp computes Sᵀ = K Qᵀ
and dPᵀ = V dOᵀ, turns them into codes of Pᵀ and dSᵀ in registers, and multiplies these, from registers, with dO and Q.
Products of codes that are all 0, as in fully masked tiles, and meet no NaN are skipped. With 128 channels a thread has
registers for one sum: dV and dK have a launch each, which recomputes the probabilities, five products per tile instead
of four.

A row of Pᵀ times dO's scale, and a row of dSᵀ times Q's scale, have scales that change only when the row exceeds its
range (:mod:`cuda_kernels.attention.backward.running_scale`). Each tile's products are scaled and added in float32. The
tensor cores of these GPUs are slow enough for the additions to take no extra time. Numerics: the reference's
``_dk_dv``.

**With 256 channels** dV and dK have a launch each as well, and each half of a result has its own block, which
recomputes the probabilities: 16 products of 128 channels per tile instead of eight. Codes of K and, for dK, of V take
32 KB each of a block's 99 KB. Q of 64 queries, for dK also dO, and 128 channels of a transposed copy share a ring of
two stages; one is copied while the other is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np

from cuda_kernels.attention.backward.running_scale import START, make_row_codes, refitted, row_scale
from cuda_kernels.attention.backward.statistics import (
    CODE_UNIT,
    CORRECTED,
    GRADIENT_SCALE_INV,
    QUERY_SCALE_INV,
    SMALLEST,
    STATISTICS,
    TOTAL,
)
from cuda_kernels.attention.mma.operands import (
    CHANNELS,
    LINE,
    TILE,
    attention_by_mma,
    make_gradient_store,
    make_half_copy,
    make_part_of,
    make_row_copy,
    own_place,
)
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.softmax import quad_max
from cuda_kernels.attention.spec import ROWS, TILE_FIRST, TILE_LAST, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.tiles import make_band_mask, parameters_of_pass, visible_columns, visited_tiles
from cuda_kernels.device.fragments import (
    exp2_columns,
    rows_amax,
    rows_max,
    score_gradients_columns,
    slice_fragment,
    zeros,
)
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    dynamic_shared,
    float_max,
    from_bits,
    load_f32,
    shared_load_4,
    warp_any,
)
from cuda_kernels.device.swizzle import along_row, ldmatrix_a, ldmatrix_b
from cuda_kernels.kernel import Kernel

QUERIES = 64
"""Queries of a tile."""
_AT_ONCE = 16
"""Queries whose dP is in registers at a time."""
_STAGE = QUERIES * LINE
_WIDE_STAGE = CHANNELS * LINE
"""With 256 channels, bytes of 128 channels of a tile's transposed queries, half of each line; or of its queries."""
_OF_EACH = 4 * QUERIES
"""Bytes of one statistic of a stage."""
STATISTICS_BYTES = (STATISTICS - CORRECTED) * _OF_EACH
_ZERO, _ONE = np.float32(0), np.float32(1)

Result = Literal["dv", "dk", "both"]
RESULTS: dict[int, tuple[Result, ...]] = {64: ("both",), 96: ("both",), 128: ("dv", "dk"), 256: ("dv", "dk")}
"""Results of the launches for dK and dV, by channels of a head."""


@cache
def make_query_statistics(offset: int) -> tuple[Any, Any, Any]:
    """Device functions for the statistics of a tile of queries in a stage; the first stage's are at ``offset``.

    The first, ``(smem, stage, statistics, head, rows_q, query)``, starts to copy them, from packed row ``query`` on.
    The second, ``(smem, stage, which, query)``, is the address of a statistic of query ``query`` of the tile. The
    third, ``(smem, stage)``, is the sum of D of two of the tile's queries; the lanes together cover all. It is NaN for
    a query whose dO has NaN.
    """

    @device
    def place(stage, which, query):
        return i32(offset + stage * STATISTICS_BYTES + (which - CORRECTED) * _OF_EACH + 4 * query)

    @device
    def copy(smem, stage, statistics, head, rows_q, query):
        which, part = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
        if which < STATISTICS - CORRECTED:
            place_of_row = (i64(head) * STATISTICS + CORRECTED + which) * rows_q + query
            cp_async_16(smem + place(stage, CORRECTED + which, 4 * part), statistics + place_of_row * 4 + 16 * part, 16)

    @device
    def statistic_address(smem, stage, which, query):
        return smem + place(stage, which, query)

    @device
    def two_of_d(smem, stage):
        lane = cuda.threadIdx.x & 31
        first_tile = from_bits(shared_load_4(smem + place(stage, CORRECTED, lane)))
        return first_tile + from_bits(shared_load_4(smem + place(stage, CORRECTED, lane + 32)))

    return copy, statistic_address, two_of_d


@cache
def make_rounded(num_registers: int) -> Any:
    """A device function ``(x, factor, amax, amax_below, limits) -> words, limits`` for ``num_registers`` registers.

    ``words``: codes of the rows of ``x`` times ``factor`` in units of their scales, an operand A. ``amax``,
    ``amax_below``: the rows' largest magnitudes before ``factor``, in this thread's columns. ``limits``: the scales'.
    """
    codes_of = make_row_codes(num_registers)

    @device
    def rounded(x, factor, amax, amax_below, limits):
        limit, _ = refitted(quad_max(amax) * factor, limits[0])
        limit_below, _ = refitted(quad_max(amax_below) * factor, limits[1])
        return codes_of(x, row_scale(factor, limit), row_scale(factor, limit_below)), (limit, limit_below)

    return rounded


@cache
def mma_attention_dkv_kernel(spec: AttentionSpec, result: Result = "both") -> Kernel:
    """``dk`` and ``dv`` of the reference's ``backward``, or one of them, in ``spec.out_dtype``.

    Parameters are those of :func:`cuda_kernels.attention.backward.dkv.attention_dkv_kernel`, with addresses instead of
    tensor maps; ``scratch`` is not used. Operands that ``result`` does not depend on are not read.
    """
    if spec.panels > 1:
        return _make_wide_dkv(spec, result)
    with_dv, with_dk = result != "dk", result != "dv"
    head_dim = spec.head_dim
    v_offset, q_offset, do_offset, qt_offset = TILE, 2 * TILE, 3 * TILE, 4 * TILE
    dot_offset = qt_offset + head_dim * LINE
    statistics_offset = dot_offset + head_dim * LINE
    num_registers, sums_count = QUERIES // 2, head_dim // 2
    copy_queries, copy_half = make_row_copy(QUERIES, head_dim), make_half_copy(head_dim)
    product, add_product = make_product(QUERIES, spec.k_steps), make_add_product(head_dim, QUERIES // STEP)
    hide, exp2, gradients_of = make_band_mask(num_registers), exp2_columns(num_registers), make_gradients(spec)
    max_of, amax_of = rows_max(num_registers), rows_amax(num_registers)
    rounded, zero_sums = make_rounded(num_registers), zeros(sums_count)
    copy_statistics, statistic, two_of_d = make_query_statistics(statistics_offset)

    @device
    def copy_tile(smem, stage, addresses, rows_q, head, query):
        """``query``: the tile's first packed row."""
        q, do, q_t, do_t, statistics = addresses
        in_q, in_qt = (i64(head) * rows_q + query) * head_dim, i64(head) * head_dim * rows_q + query
        copy_queries(smem + q_offset + stage * _STAGE, q + in_q, i64(head_dim))
        if with_dk:
            copy_queries(smem + do_offset + stage * _STAGE, do + in_q, i64(head_dim))
            copy_half(smem + qt_offset, stage, q_t + in_qt, i64(rows_q))
        if with_dv:
            copy_half(smem + dot_offset, stage, do_t + in_qt, i64(rows_q))
        copy_statistics(smem, stage, statistics, head, rows_q, query)

    @device
    def attend(smem, tile, addresses, rows_q, first_head, group, key_factor, value_scale_inv, left, right):
        queries = tile[TILE_OTHERS]
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        own_row, own_column = own_place()
        visible = visible_columns(tile, own_row, own_column, left, right)
        in_k, in_b = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane)), i32(smem + ldmatrix_b(lane))
        dv, dk = zero_sums(), zero_sums()
        p_limits, ds_limits = (START, START), (START, START)
        stage, end = i32(0), i32(first_head + group)
        if first_tile < last_tile:
            copy_tile(smem, stage, addresses, rows_q, first_head, queries + first_tile * QUERIES)
        cp_async_commit()
        for head in range(first_head, end):
            for i in range(first_tile, last_tile):
                cp_async_wait(0)
                cuda.syncthreads()  # the tile has arrived, and all threads are done with the previous one
                if i + 1 < last_tile:
                    copy_tile(smem, stage ^ 1, addresses, rows_q, head, queries + (i + 1) * QUERIES)
                elif head + 1 < end:
                    copy_tile(smem, stage ^ 1, addresses, rows_q, head + 1, queries + first_tile * QUERIES)
                cp_async_commit()
                query_scale_inv = from_bits(shared_load_4(statistic(smem, stage, QUERY_SCALE_INV, own_column)))
                gradient_scale_inv = from_bits(shared_load_4(statistic(smem, stage, GRADIENT_SCALE_INV, own_column)))
                scores = product(in_k, in_b + q_offset + stage * _STAGE)
                if i < whole_first or i >= whole_last:
                    scores = hide(scores, visible, i32(i * QUERIES))
                factor = float_max(key_factor * query_scale_inv, SMALLEST)
                p = exp2(scores, factor, statistic(smem, stage, TOTAL, own_column))
                half = stage << 6
                if with_dv:
                    amax, amax_below = max_of(p)
                    words, p_limits = rounded(p, gradient_scale_inv, amax, amax_below, p_limits)
                    d = two_of_d(smem, stage)  # 0 * NaN is not 0
                    # The branch also keeps the assembler from starting later work early and running out of registers.
                    if warp_any(amax != _ZERO or amax_below != _ZERO or d != d):
                        unit, unit_below = p_limits[0] * CODE_UNIT, p_limits[1] * CODE_UNIT
                        dv = add_product(dv, words, along_row(in_b + dot_offset, half), unit, unit_below)
                if with_dk:
                    ds = gradients_of(
                        p, in_k + v_offset, in_b + do_offset + stage * _STAGE, value_scale_inv * gradient_scale_inv,
                        statistic(smem, stage, CORRECTED, own_column),
                    )  # fmt: skip
                    amax, amax_below = amax_of(ds)
                    words, ds_limits = rounded(ds, query_scale_inv, amax, amax_below, ds_limits)
                    if warp_any(amax != _ZERO or amax_below != _ZERO):
                        unit, unit_below = ds_limits[0] * CODE_UNIT, ds_limits[1] * CODE_UNIT
                        dk = add_product(dk, words, along_row(in_b + qt_offset, half), unit, unit_below)
                stage = i32(stage ^ 1)
        return dv, dk

    return dkv_pass(spec, result, attend, statistics_offset + 2 * STATISTICS_BYTES)


def dkv_pass(spec: AttentionSpec, result: Result, attend: Any, shared_bytes: int) -> Kernel:
    """The kernel for dK and dV, or one of them, that loops over the queries by ``attend``.

    Args:
        spec: compile-time options.
        result: which of them.
        attend: a device function ``(smem, tile, addresses, rows_q, first_head, group, key_factor, value_scale_inv,
            left, right) -> dv, dk`` of this thread, the latter without the softmax scale; those not in ``result`` are
            not used. When it is called, copies of K, and after it V, to ``smem`` have been started. ``addresses``: of
            Q, dO, both transposed, from the block's first channel on, and the statistics. ``key_factor``: K's
            ``scale_inv`` times c.
        shared_bytes: the shared memory of a block, in bytes.
    """
    with_dv, with_dk, head_dim, v_offset = result != "dk", result != "dv", spec.head_dim, spec.panels * TILE
    copy_keys, store = make_row_copy(ROWS, head_dim), make_gradient_store(spec)
    part_of, part_again = make_part_of(head_dim)

    def mma_attention_dkv(
        k, v, q, do, q_t, do_t, statistics, table, scale_inv_k, scale_inv_v, dk_out, dv_out, scratch,
        heads_at_once, group, rows_q, rows_k, left, right, c, softmax_scale, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        smem = dynamic_shared()
        tile, head, first_channel = part_of(table, heads_at_once)
        packed_row = tile[TILE_ROW]
        in_k = (i64(head) * rows_k + packed_row) * head_dim
        block = (i64(head) * (rows_k >> 7) + (packed_row >> 7)) * 4
        if tile[TILE_FIRST] < tile[TILE_LAST]:
            copy_keys(smem, k + in_k, i64(head_dim))
            if with_dk:
                copy_keys(smem + v_offset, v + in_k, i64(head_dim))
        of_channel = i64(first_channel) * rows_q
        dv, dk = attend(
            smem, tile, (q, do, q_t + of_channel, do_t + of_channel, statistics), rows_q, i32(head * group), group,
            load_f32(scale_inv_k + block) * c, load_f32(scale_inv_v + block), left, right,
        )  # fmt: skip
        tile, head, first_channel = part_again(table, heads_at_once)
        strides = stride_b, stride_l, stride_h
        if with_dv:
            store(dv, _ONE, dv_out, tile, head, first_channel, strides)
        if with_dk:
            store(dk, softmax_scale, dk_out, tile, head, first_channel, strides)

    parameters = parameters_of_pass(
        "", "k v q do q_t do_t statistics table scale_inv_k scale_inv_v dk_out dv_out scratch", "c softmax_scale"
    )
    return attention_by_mma(f"mma_attention_dkv({spec}, {result})", mma_attention_dkv, parameters, shared_bytes)


@cache
def make_gradients(spec: AttentionSpec, v_offset: int = 0, start: int = 0) -> Any:
    """A device function ``(p, v_address, do_address, factor, delta) -> ds`` of a warp's rows.

    It computes the queries from ``start`` on. The addresses of V, without ``v_offset``, and dO are those for ldmatrix;
    their product times ``factor`` is dP. ``delta``: the address of D of the thread's first column.
    """
    num_registers = _AT_ONCE // 2
    product = make_product(_AT_ONCE, spec.k_steps, start, spec.panels, QUERIES, (v_offset, 0))
    part, gradients_of = slice_fragment(QUERIES // 2, start // 2, num_registers), score_gradients_columns(num_registers)

    @device
    def some(p, v_address, do_address, factor, delta):
        return gradients_of(product(v_address, do_address), part(p), factor, delta + 4 * start)

    if start + _AT_ONCE == QUERIES:
        return some
    others = make_gradients(spec, v_offset=v_offset, start=start + _AT_ONCE)

    @device
    def gradients(p, v_address, do_address, factor, delta):
        return some(p, v_address, do_address, factor, delta) + others(p, v_address, do_address, factor, delta)

    return gradients


def _make_wide_dkv(spec: AttentionSpec, result: Result) -> Kernel:
    """:func:`mma_attention_dkv_kernel` with 256 channels, of dK or dV; a tile of a head has two consecutive blocks."""
    assert result != "both", "there are no registers for sums of more channels"
    is_dk, head_dim, panels = result == "dk", spec.head_dim, spec.panels
    v_offset = panels * TILE
    ring = 2 * v_offset if is_dk else v_offset
    statistics_offset = ring + 2 * _WIDE_STAGE
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
                there, query = i32(here ^ _WIDE_STAGE), i32(queries + i * QUERIES)
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
                free = smem + ring + (transposed ^ _WIDE_STAGE)
                if i + 1 < last_tile:
                    copy_q(smem, free, addresses, rows_q, head, query + QUERIES)
                elif head + 1 < end:
                    copy_q(smem, free, addresses, rows_q, head + 1, queries + first_tile * QUERIES)
                cp_async_commit()
                # Codes that are all 0, as in fully masked tiles, can be skipped unless they meet NaN.
                if warp_any(amax != _ZERO or amax_below != _ZERO or d != d):
                    unit, unit_below = limits[0] * CODE_UNIT, limits[1] * CODE_UNIT
                    sums = add_product(sums, words, in_b + transposed, unit, unit_below)
                here = i32(transposed ^ _WIDE_STAGE)
        return sums, sums

    return dkv_pass(spec, result, attend, statistics_offset + STATISTICS_BYTES)
