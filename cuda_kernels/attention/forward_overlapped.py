"""How the forward pass's block processes the keys, overlapping products with other work: with 128 channels.

A warpgroup issues the scores of the next tile of 128 keys before the exponentials of the current one, and the current
tile's product with V before the maxima of the next one, so that the tensor cores work while it computes. This is
FlashAttention-3's intra-warpgroup pipelining (arXiv:2407.08608, section 3.2), with the scores one step earlier: there a
warpgroup waits for them. Both warpgroups need the same unit for exponentials, so they take turns.

**Registers.** Scores of two tiles and the sums take 192 of a thread's 240 registers. Therefore a tile's product with V
uses the registers of its scores, whose exponentials are codes by then, and the scores of the tile after the next one
those of the product. The two sets of registers swap roles with each tile, so the loop is unrolled by two tiles.
Otherwise the assembler would move a set in each iteration.
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
from cuda_kernels.device.swizzle import smem_descriptor

CHANNELS = 128
"""Channels of a head for which the scores of a tile and its product with V take the same number of registers."""


def make_overlapped_tiles(spec: AttentionSpec) -> ForwardTiles:
    """For heads of :data:`CHANNELS`."""
    assert spec.head_dim == CHANNELS
    offsets = forward_offsets(spec)
    q_offset, k_offset, v_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    registers = ROWS // 2
    zero = zeros(registers)
    scores_of, times_v = make_product(ROWS, spec.k_steps), make_register_product(CHANNELS, ROWS // 32)
    wait_0, wait_1 = wgmma_wait(registers, 0), wgmma_wait(registers, 1)
    hide, scaled, rescale_add = make_band_mask(registers), scale_all(registers), rescale_add_rows(registers)
    rebase, probabilities = make_softmax(ROWS)
    next_stage = stage_counters(forward_stages(spec))

    @device
    def release(barrier):
        if cuda.threadIdx.x & 127 == 0:
            mbarrier_arrive(barrier)

    @device
    def start_scores(block, stage_idx, phase):
        """Issue the product of Q and a tile's keys, once these are loaded and it is the warpgroup's turn."""
        smem, wg_idx, desc_q = block[0], block[1], block[2]
        mbarrier_wait(smem + full_k + 8 * stage_idx, phase)
        named_barrier(TURN + wg_idx, 256)
        wgmma_fence()
        return scores_of(zero(), desc_q, smem_descriptor(smem + k_offset + stage_idx * TILE), 0)

    @device
    def start_part(block, scores, words, stage_idx):
        """Issue the product of a tile's probabilities and V, into the registers of the tile's ``scores``."""
        wgmma_fence()
        return times_v(scores, words, smem_descriptor(block[0] + v_offset + stage_idx * TILE), 0)

    @device
    def with_maxima(block, j, scores, key_scale_inv, softmax_state):
        """Scores of tile ``j``, masked with -inf, and the maxima and factors for their exponentials."""
        query_factor, visible, whole_first, whole_last = block[3], block[4], block[5], block[6]
        if j < whole_first or j >= whole_last:
            scores = hide(scores, visible, i32(j * ROWS))
        factor = float_max(query_factor * key_scale_inv, SMALLEST)
        softmax_state, offsets, alphas = rebase(scores, factor, softmax_state)
        return scores, factor, offsets, alphas, softmax_state

    @device
    def add_part(acc_o, unit, part, alphas, value_scale_inv):
        """Add a tile's product to the sums in float32, by the instruction that rescales them."""
        ratio = ONE
        if can_be_unit(value_scale_inv):
            ratio = unit * reciprocal_approx(value_scale_inv)
            unit = value_scale_inv
        else:
            part = scaled(part, value_scale_inv * reciprocal_approx(unit))
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
        named_barrier_arrive(TURN + 1 - wg_idx, 256)
        part = start_part(block, scores, words, stage_idx)
        next_scores = wait_1(next_scores)
        release(smem + empty_k + 8 * next_idx)
        next_tile = with_maxima(block, i32(j + 1), next_scores, key_scale_inv, softmax_state)
        # This wait belongs to the next step, but is placed here: without another wait in between, the assembler would
        # move the wait for the product in front of the maxima.
        mbarrier_wait(smem + full_v + 8 * next_idx, next_phase)
        part = wait_0(part)
        release(smem + empty_v + 8 * stage_idx)
        acc_o, unit = add_part(acc_o, unit, part, alphas, value_scale_inv)
        return i32(j + 1), next_idx, next_phase, next_tile, acc_o, unit

    @device
    def consume(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        row_in_tile, col_in_tile = accumulator_origin(wg_idx)
        visible = visible_columns(tile, row_in_tile, col_in_tile, left, right)
        query_factor = from_bits(load_4_if(scale_inv_q, True)) * c
        desc_q = smem_descriptor(smem + q_offset + wg_idx * HALF_TILE)
        block = smem, wg_idx, desc_q, query_factor, visible, whole_first, whole_last, scale_inv_k, scale_inv_v
        acc_o, unit, softmax_state = zero(), ONE, START
        if wg_idx == 1:  # the other warpgroup has the first turn
            named_barrier_arrive(TURN, 256)
        mbarrier_wait(smem + full_q, 0)
        if first_tile < last_tile:
            key_scale_inv = load_f32(scale_inv_k + i64(first_tile) * 4)
            scores = wait_0(start_scores(block, i32(0), i32(0)))
            named_barrier_arrive(TURN + 1 - wg_idx, 256)
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
            part = wait_0(start_part(block, scores, words, stage_idx))
            acc_o, unit = add_part(acc_o, unit, part, alphas, value_scale_inv)
        return acc_o, unit, softmax_state

    return ForwardTiles(consume, make_result_store(CHANNELS, spec.out_dtype))
