"""How the forward pass's block on Hopper processes the keys: its shared memory, and two schedules.

A warpgroup turns the scores of a tile of 128 keys into their maxima, exponentials and codes, and multiplies these with
V. Both warpgroups need the same unit for exponentials, so they take turns: one's exponentials overlap with the other's
products and maxima (FlashAttention-3, arXiv:2407.08608, section 3.1). If the turn were passed before the maxima, both
would compute maxima at the same time, on the same unit.

**With 128 channels** products also overlap with other work of their own warpgroup. It issues the scores of the next
tile before the exponentials of the current one, and the current tile's product with V before the maxima of the next
one. This is FlashAttention-3's intra-warpgroup pipelining (section 3.2), with the scores one step earlier: there a
warpgroup waits for them.

Scores of two tiles and the sums take 192 of a thread's 240 registers. Therefore a tile's product with V uses the
registers of its scores, whose exponentials are codes by then, and the scores of the tile after the next one those of
the product. The two sets of registers swap roles with each tile, so the loop is unrolled by two tiles. Otherwise the
assembler would move a set in each iteration.

**With 64, 96 or 256 channels** each product is waited for. With 256, the sums leave no registers for two tiles. With
64 and 96, a tile's product with V has fewer registers than its scores, and the assembler spills, or serializes single
products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.block import HALF_TILE, TILE, accumulator_origin, per_stage, placed
from cuda_kernels.attention.products import make_product, make_register_product
from cuda_kernels.attention.softmax import START, make_softmax
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES, make_result_store
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
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

_OVERLAPPED = 128
"""Channels of a head for which the scores of a tile and its product with V take the same number of registers."""
_TURN = 2
"""The first of two named barriers, one for each warpgroup's turn."""
_ONE = np.float32(1)
_STAGES = {64: 4, 96: 3, 128: 3, 256: 2}
_LEAST_UNIT, _LARGEST_UNIT = np.float32(2.0**-24), np.float32(2.0**24)


def forward_stages(spec: AttentionSpec) -> int:
    """Number of stages of the ring of keys and values."""
    return _STAGES[spec.head_dim]


def forward_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the total size."""
    stages = forward_stages(spec)
    ring = per_stage(stages, k=spec.panels * TILE, v=spec.head_dim * 128)
    barriers = per_stage(stages, full_k=8, full_v=8, empty_k=8, empty_v=8)
    return placed(q=spec.panels * TILE, **ring, out=8 * WARP_BYTES, full_q=8, **barriers)


@device
def _can_be_unit(value_scale_inv):
    """Whether a scale of V can be the unit of the sums: near 1, so that their range is the specification's."""
    return _LEAST_UNIT <= value_scale_inv <= _LARGEST_UNIT


def make_forward_tiles(spec: AttentionSpec) -> tuple[Any, Any]:
    """Device functions that process the keys, and store the result.

    The first is ``(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c) -> sums, unit,
    softmax_state``: this thread's sums, their unit, and the softmax's state. ``scale_inv``: addresses of the scales of
    the block's queries, and of the sequence's first keys. Unless products overlap, the sums are a pair; the second is
    for channels beyond 128. The second function is ``(sums, s, t, i, j, shared, out, tile, head, warp, strides)``, as
    made by :func:`cuda_kernels.attention.stores.make_result_store`.
    """
    offsets = forward_offsets(spec)
    q_offset, k_offset, v_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    k_bytes, v_bytes = spec.panels * TILE, spec.head_dim * 128
    columns, two_halves = min(spec.head_dim, 128), spec.head_dim > 128
    scores_count, acc_count = ROWS // 2, columns // 2
    zero_scores, zero_acc = zeros(scores_count), zeros(acc_count)
    scores_of, times_v = make_product(ROWS, spec.k_steps, spec.panels), make_register_product(columns, ROWS // 32)
    scores_wait_0, scores_wait_1 = wgmma_wait(scores_count, 0), wgmma_wait(scores_count, 1)
    acc_wait_0 = wgmma_wait(acc_count, 0)
    hide, (rebase, probabilities) = make_band_mask(scores_count), make_softmax(ROWS)
    scaled, rescale_add = scale_all(acc_count), rescale_add_rows(acc_count)
    store_low = make_result_store(columns, spec.out_dtype)
    store_high = make_result_store(columns, spec.out_dtype, 128, again=True)
    next_stage = stage_counters(forward_stages(spec))

    @device
    def begin(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        """What does not change in the loop over the keys."""
        _, _, whole_first, whole_last = visited_tiles(tile)
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        query_factor = from_bits(load_4_if(scale_inv_q, True)) * c
        desc_q = smem_descriptor(smem + q_offset + wg_idx * HALF_TILE)
        return smem, wg_idx, desc_q, query_factor, visible, whole_first, whole_last, scale_inv_k, scale_inv_v

    @device
    def release(barrier):
        if cuda.threadIdx.x & 127 == 0:
            mbarrier_arrive(barrier)

    @device
    def start_scores(block, stage_idx, phase):
        """Issue the product of Q and a tile's keys, once these are loaded and it is the warpgroup's turn."""
        smem, wg_idx, desc_q = block[0], block[1], block[2]
        mbarrier_wait(smem + full_k + 8 * stage_idx, phase)
        named_barrier(_TURN + wg_idx, 256)
        wgmma_fence()
        return scores_of(zero_scores(), desc_q, smem_descriptor(smem + k_offset + stage_idx * k_bytes), 0)

    @device
    def start_part(block, scores, words, stage_idx):
        """Issue the product of a tile's probabilities and V, into the registers of the tile's ``scores``."""
        wgmma_fence()
        return times_v(scores, words, smem_descriptor(block[0] + v_offset + stage_idx * v_bytes), 0)

    @device
    def masked(block, j, scores):
        """Scores of tile ``j``, -inf where they are hidden."""
        visible, whole_first, whole_last = block[4], block[5], block[6]
        return hide(scores, visible, i32(j * ROWS)) if j < whole_first or j >= whole_last else scores

    @device
    def with_maxima(block, j, scores, key_scale_inv, softmax_state):
        """Scores of tile ``j``, and the maxima and factors for their exponentials."""
        scores = masked(block, j, scores)
        factor = float_max(block[3] * key_scale_inv, SMALLEST)
        softmax_state, offsets, alphas = rebase(scores, factor, softmax_state)
        return scores, factor, offsets, alphas, softmax_state

    @device
    def in_unit(part, value_scale_inv, unit):
        """A tile's product in the unit of the sums, which may change; that unit, and the factor of previous sums."""
        ratio = _ONE
        if _can_be_unit(value_scale_inv):
            ratio = unit * reciprocal_approx(value_scale_inv)
            unit = value_scale_inv
        else:
            part = scaled(part, value_scale_inv * reciprocal_approx(unit))
        return part, unit, ratio

    @device
    def add_part(acc_o, unit, part, alphas, value_scale_inv):
        """Add a tile's product to the sums in float32, by the instruction that rescales them."""
        part, unit, ratio = in_unit(part, value_scale_inv, unit)
        return rescale_add(acc_o, part, alphas[0] * ratio, alphas[1] * ratio), unit

    @device
    def step(block, state):
        """A tile's exponentials and its product with V, and the scores of the next tile and their maxima."""
        smem, wg_idx, scale_inv_k, scale_inv_v = block[0], block[1], block[7], block[8]
        j, stage_idx, phase, (scores, factor, offsets, alphas, softmax_state), acc_o, unit = state
        # Coherent loads, which are not moved across barriers, complete during the exponentials.
        key_scale_inv, value_scale_inv = load_f32(scale_inv_k + i64(j + 1) * 4), load_f32(scale_inv_v + i64(j) * 4)
        next_idx, next_phase = next_stage(stage_idx, phase)
        next_scores = start_scores(block, next_idx, next_phase)
        words, softmax_state = probabilities(scores, factor, offsets, alphas, softmax_state)
        named_barrier_arrive(_TURN + 1 - wg_idx, 256)
        part = start_part(block, scores, words, stage_idx)
        next_scores = scores_wait_1(next_scores)
        release(smem + empty_k + 8 * next_idx)
        next_tile = with_maxima(block, i32(j + 1), next_scores, key_scale_inv, softmax_state)
        # This wait belongs to the next step, but is placed here: without another wait in between, the assembler would
        # move the wait for the product in front of the maxima.
        mbarrier_wait(smem + full_v + 8 * next_idx, next_phase)
        part = acc_wait_0(part)
        release(smem + empty_v + 8 * stage_idx)
        acc_o, unit = add_part(acc_o, unit, part, alphas, value_scale_inv)
        return i32(j + 1), next_idx, next_phase, next_tile, acc_o, unit

    @device
    def consume_overlapped(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        first_tile, last_tile, _, _ = visited_tiles(tile)
        block = begin(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c)
        acc_o, unit, softmax_state = zero_acc(), _ONE, START
        if wg_idx == 1:  # the other warpgroup has the first turn
            named_barrier_arrive(_TURN, 256)
        mbarrier_wait(smem + full_q, 0)
        if first_tile < last_tile:
            key_scale_inv = load_f32(scale_inv_k + i64(first_tile) * 4)
            scores = scores_wait_0(start_scores(block, i32(0), i32(0)))
            named_barrier_arrive(_TURN + 1 - wg_idx, 256)
            release(smem + empty_k)
            first = with_maxima(block, first_tile, scores, key_scale_inv, softmax_state)
            mbarrier_wait(smem + full_v, 0)
            state = first_tile, i32(0), i32(0), first, acc_o, unit
            steps = i32(last_tile - first_tile - 1)
            for _ in range(steps >> 1):
                state = step(block, step(block, state))
            if steps & 1:
                state = step(block, state)
            j, stage_idx, _, (scores, factor, offsets, alphas, softmax_state), acc_o, unit = state
            value_scale_inv = load_f32(scale_inv_v + i64(j) * 4)
            words, softmax_state = probabilities(scores, factor, offsets, alphas, softmax_state)
            part = acc_wait_0(start_part(block, scores, words, stage_idx))
            acc_o, unit = add_part(acc_o, unit, part, alphas, value_scale_inv)
        return acc_o, unit, softmax_state

    @device
    def values_of(words, desc_v):
        """The product of P's codes with 128 channels of V."""
        wgmma_fence()
        return acc_wait_0(times_v(zero_acc(), words, desc_v, 0))

    @device
    def consume_in_turns(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        first_tile, last_tile, _, _ = visited_tiles(tile)
        wg_thread = cuda.threadIdx.x & 127
        block = begin(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c)
        desc_q, query_factor = block[2], block[3]
        softmax_state = START
        acc_o, acc_o_high = zero_acc(), zero_acc()
        unit = _ONE
        next_key_scale_inv = from_bits(load_4_if(scale_inv_k + i64(first_tile) * 4, first_tile < last_tile))
        next_value_scale_inv = from_bits(load_4_if(scale_inv_v + i64(first_tile) * 4, first_tile < last_tile))
        stage_idx, phase = i32(0), i32(0)
        if wg_idx == 1:  # the other warpgroup has the first turn
            named_barrier_arrive(_TURN, 256)
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
            named_barrier(_TURN + wg_idx, 256)
            wgmma_fence()
            scores = scores_wait_0(scores_of(zero_scores(), desc_q, desc_k, 0))
            if wg_thread == 0:
                mbarrier_arrive(smem + empty_k + 8 * stage_idx)
            scores = masked(block, j, scores)
            softmax_state, offsets, alphas = rebase(scores, factor, softmax_state)
            named_barrier_arrive(_TURN + 1 - wg_idx, 256)
            words, softmax_state = probabilities(scores, factor, offsets, alphas, softmax_state)
            alpha, alpha_below = alphas
            mbarrier_wait(smem + full_v + 8 * stage_idx, phase)
            part, unit, ratio = in_unit(values_of(words, desc_v), value_scale_inv, unit)
            acc_o = rescale_add(acc_o, part, alpha * ratio, alpha_below * ratio)
            if two_halves:
                part = values_of(words, advance_descriptor(desc_v, TILE))
                if not _can_be_unit(value_scale_inv):
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

    if spec.head_dim == _OVERLAPPED:
        return consume_overlapped, store_low
    return consume_in_turns, store
