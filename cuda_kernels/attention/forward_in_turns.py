"""How the forward pass's block processes the keys if each product is waited for: with 64, 96 or 256 channels.

For a tile of 128 keys a warpgroup computes the scores and their maxima, passes the turn to the other one, computes
exponentials, and multiplies them with V. One warpgroup's exponentials overlap with the other's products and maxima
(FlashAttention-3, arXiv:2407.08608, section 3.1). If the turn were passed before the maxima, both would compute maxima
at the same time, on the same unit.

With 256 channels, the sums leave no registers for the scheme of :mod:`.forward_overlapped`. With 64 and 96 channels, a
tile's product with V has fewer registers than its scores, and the assembler spills, or serializes single products.
"""

from __future__ import annotations

from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.block import HALF_TILE, TILE
from cuda_kernels.attention.forward_block import (
    ONE,
    TURN,
    ForwardTiles,
    can_be_unit,
    forward_offsets,
    forward_stages,
)
from cuda_kernels.attention.products import make_product, make_register_product
from cuda_kernels.attention.softmax import START, make_softmax
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import make_result_store
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
from cuda_kernels.attention.warp_roles import accumulator_origin
from cuda_kernels.device.fragments import rescale_add_rows, scale_all, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import float_max, from_bits, load_4_if, load_f32, reciprocal_approx
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    mbarrier_arrive,
    mbarrier_wait,
    named_barrier,
    named_barrier_arrive,
    wgmma_fence,
    wgmma_wait,
)
from cuda_kernels.device.swizzle import advance_descriptor, smem_descriptor


def make_tiles_in_turns(spec: AttentionSpec) -> ForwardTiles:
    """For all other numbers of channels. The sums are a pair; the second is for channels beyond 128."""
    offsets = forward_offsets(spec)
    q_offset, k_offset, v_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    k_bytes, v_bytes = spec.panels * TILE, spec.head_dim * 128
    columns = min(spec.head_dim, 128)
    two_halves = spec.head_dim > 128
    scores_count, acc_count = ROWS // 2, columns // 2
    zero_scores, zero_acc = zeros(scores_count), zeros(acc_count)
    scores_of = make_product(ROWS, spec.k_steps, spec.panels)
    times_v = make_register_product(columns, ROWS // 32)
    scores_done, part_done = wgmma_wait(scores_count, 0), wgmma_wait(acc_count, 0)
    hide, (rebase, probabilities) = make_band_mask(scores_count), make_softmax(ROWS)
    scaled, rescale_add = scale_all(acc_count), rescale_add_rows(acc_count)
    store_low = make_result_store(columns, spec.out_dtype)
    store_high = make_result_store(columns, spec.out_dtype, 128, again=True)
    next_stage = stage_counters(forward_stages(spec))

    @device
    def values_of(words, desc_v):
        """The product of P's codes with 128 channels of V."""
        wgmma_fence()
        return part_done(times_v(zero_acc(), words, desc_v, 0))

    @device
    def consume(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        wg_thread = cuda.threadIdx.x & 127
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        query_factor = from_bits(load_4_if(scale_inv_q, True)) * c
        desc_q = smem_descriptor(smem + q_offset + wg_idx * HALF_TILE)
        softmax_state = START
        acc_o, acc_o_high = zero_acc(), zero_acc()
        unit = ONE
        next_key_scale_inv = from_bits(load_4_if(scale_inv_k + i64(first_tile) * 4, first_tile < last_tile))
        next_value_scale_inv = from_bits(load_4_if(scale_inv_v + i64(first_tile) * 4, first_tile < last_tile))
        stage_idx, phase = i32(0), i32(0)
        if wg_idx == 1:  # the other warpgroup has the first turn
            named_barrier_arrive(TURN, 256)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first_tile, last_tile):
            factor = float_max(query_factor * next_key_scale_inv, SMALLEST)
            value_scale_inv = next_value_scale_inv
            # Coherent loads, which are not moved across barriers: scales of the next tile, a whole tile ahead.
            ahead = i64(min(i32(j + 1), i32(last_tile - 1))) * 4
            next_key_scale_inv, next_value_scale_inv = load_f32(scale_inv_k + ahead), load_f32(scale_inv_v + ahead)
            desc_k = smem_descriptor(smem + k_offset + stage_idx * k_bytes)
            desc_v = smem_descriptor(smem + v_offset + stage_idx * v_bytes)
            mbarrier_wait(smem + full_k + 8 * stage_idx, phase)
            named_barrier(TURN + wg_idx, 256)
            wgmma_fence()
            scores = scores_done(scores_of(zero_scores(), desc_q, desc_k, 0))
            if wg_thread == 0:
                mbarrier_arrive(smem + empty_k + 8 * stage_idx)
            if j < whole_first or j >= whole_last:
                scores = hide(scores, visible, i32(j * ROWS))
            softmax_state, offsets, alphas = rebase(scores, factor, softmax_state)
            named_barrier_arrive(TURN + 1 - wg_idx, 256)
            words, softmax_state = probabilities(scores, factor, offsets, alphas, softmax_state)
            alpha, alpha_below = alphas
            mbarrier_wait(smem + full_v + 8 * stage_idx, phase)
            part = values_of(words, desc_v)
            usual = can_be_unit(value_scale_inv)
            ratio = ONE
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
        return (acc_o, acc_o_high), unit, softmax_state

    @device
    def store(sums, s, t, i, j, shared, out, tile, head, warp, strides):
        store_low(sums[0], s, t, i, j, shared, out, tile, head, warp, strides)
        if two_halves:
            store_high(sums[1], s, t, i, j, shared, out, tile, head, warp, strides)

    return ForwardTiles(consume, store)
