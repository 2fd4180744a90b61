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
from typing import Any

import numpy as np

from cuda_kernels.attention.softmax import START, make_softmax, quad_sum, row_result
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES, make_row_store
from cuda_kernels.attention.tiles import load_tile
from cuda_kernels.device.fragments import (
    mask_rows,
    rescale_add_rows,
    scale_all,
    scale_seen_rows,
    slice_words,
    zeros,
)
from cuda_kernels.device.language import cuda, device, f32, i32, i64, tensor_map
from cuda_kernels.device.ptx import (
    dynamic_shared,
    float_max,
    from_bits,
    load_4_if,
    load_f32,
    quotient,
    reciprocal_approx,
    store_f32,
)
from cuda_kernels.device.ring import stage_counters
from cuda_kernels.device.sm90 import (
    SMEM_DESC_K_MAJOR_SW128,
    address_of,
    elect_sync,
    fence_mbarrier_init,
    grid_constant_params,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    named_barrier_arrive,
    prefetch_tensormap,
    shfl_sync_0,
    tma_load,
    warpgroup_reg_alloc,
    warpgroup_reg_dealloc,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_rs,
    wgmma_wait,
)
from cuda_kernels.kernel import Kernel

STAGES = {64: 4, 96: 3, 128: 3, 256: 2}
"""Stages of the ring of keys and values, by channels of a head."""
_PRODUCER_REGISTERS = 24
_REGISTERS = 240
_PANEL = 128 * 128
"""Bytes of 128 rows, 128 bytes of each."""
_TURN = 2
"""The first of two named barriers, one for each warpgroup's turn to multiply."""
_ONE = np.float32(1)
_SMALLEST = np.finfo(np.float32).tiny
_LEAST_UNIT, _LARGEST_UNIT = np.float32(2.0**-24), np.float32(2.0**24)
"""Scales of V that sums may be multiples of: near 1, so that sums have the range that the specification's have."""


def smem_offsets(spec: AttentionSpec, stages: int) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the size of all."""
    offsets: dict[str, int] = {}
    end = 0
    for name, size in (
        ("q", spec.panels * _PANEL),
        ("k", stages * spec.panels * _PANEL),
        ("v", stages * spec.head_dim * 128),
        ("out", 8 * WARP_BYTES),
        ("full_q", 8),
        ("full_k", 8 * stages),
        ("full_v", 8 * stages),
        ("empty_k", 8 * stages),
        ("empty_v", 8 * stages),
    ):
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def _chained(multiply: Any, offsets: tuple[int, ...], keep: int = 0) -> Any:
    """A device function ``(acc, x, y) -> acc``: products of K-major operands, 32 bytes each, at ``offsets`` from both.

    The first one replaces ``acc``, unless ``keep`` is 1.
    """
    offset = offsets[0]
    if len(offsets) == 1:
        return device(lambda acc, x, y: multiply(acc, x + offset, y + offset, keep))
    rest = _chained(multiply, offsets[1:], 1)
    return device(lambda acc, x, y: rest(multiply(acc, x + offset, y + offset, keep), x, y))


@cache
def attention_forward_kernel(spec: AttentionSpec) -> Kernel:
    """``o`` and the statistics ``m`` and ``l`` of the reference's ``forward``.

    Parameters are the tensor maps of Q, K and transposed V (:mod:`.spec` says how they lie); the addresses of the table
    of tiles, of the scales of Q, K and V, of out, m and l; the heads, how many of them share one of K and V, the packed
    rows of queries and of keys, the band's limits; the softmax scale times log2(e), which is positive; and the strides
    of out in elements, from a sequence to the next, a row and a head.
    """
    stages = STAGES[spec.head_dim]
    head_dim, panels = spec.head_dim, spec.panels
    offsets = smem_offsets(spec, stages)
    q_offset, k_offset, v_offset, out_offset, full_q, full_k, full_v, empty_k, empty_v = (
        offsets[name] for name in ("q", "k", "v", "out", "full_q", "full_k", "full_v", "empty_k", "empty_v")
    )
    q_bytes, k_bytes, v_bytes = panels * _PANEL, panels * _PANEL, head_dim * 128
    columns = min(head_dim, 128)
    two_halves = head_dim > 128
    item = 4 if spec.out == "float32" else 2
    half_bytes = columns * item
    scores_count, out_count = ROWS // 2, columns // 2
    steps = tuple((panel * _PANEL >> 4) + 2 * step for panel in range(panels) for step in range(spec.k_steps))
    zero_scores, zero_out = zeros(scores_count), zeros(out_count)
    scores_of = _chained(wgmma(ROWS, "e4m3", "e4m3"), steps)
    times_v = wgmma_rs(columns, "e4m3", "e4m3")
    scores_done, part_done = wgmma_wait(scores_count, 0), wgmma_wait(out_count, 0)
    words_0, words_1, words_2, words_3 = (slice_words(scores_count // 4, start, 4) for start in (0, 4, 8, 12))
    hide, softmax = mask_rows(scores_count), make_softmax(ROWS)
    scaled, rescale_add, finish = scale_all(out_count), rescale_add_rows(out_count), scale_seen_rows(out_count)
    store_rows, store_more_rows = make_row_store(columns, spec.out), make_row_store(columns, spec.out, again=True)
    next_stage, _ = stage_counters(stages)

    @device
    def descriptor(address):
        return SMEM_DESC_K_MAJOR_SW128 | ((address & 0x3FFFF) >> 4)

    @device
    def load_panels(smem, tensor, barrier, row):
        """128 rows of codes, whose channels beyond 128 lie in a second panel."""
        for panel in range(panels):
            tma_load(smem + panel * _PANEL, tensor, barrier, panel * 128, row)

    @device
    def produce(smem, maps, tile, head, kv_head, rows_q, rows_k):
        row, keys, first, last = tile[0], tile[1], tile[2], tile[3]
        mbarrier_arrive_expect_tx(smem + full_q, q_bytes)
        load_panels(smem + q_offset, maps[0], smem + full_q, head * rows_q + row)
        stage_idx, phase = i32(0), i32(0)
        for j in range(first, last):
            barrier = smem + full_k + 8 * stage_idx
            mbarrier_wait(smem + empty_k + 8 * stage_idx, phase ^ 1)
            mbarrier_arrive_expect_tx(barrier, k_bytes)
            load_panels(smem + k_offset + stage_idx * k_bytes, maps[1], barrier, kv_head * rows_k + keys + j * ROWS)
            barrier = smem + full_v + 8 * stage_idx
            mbarrier_wait(smem + empty_v + 8 * stage_idx, phase ^ 1)
            mbarrier_arrive_expect_tx(barrier, v_bytes)
            tma_load(smem + v_offset + stage_idx * v_bytes, maps[2], barrier, keys + j * ROWS, kv_head * head_dim)
            stage_idx, phase = next_stage(stage_idx, phase)

    @device
    def issue_values(words, desc_v):
        """Start the products of P's codes with 128 channels of V; their sum is there once it is waited for."""
        wgmma_fence()
        part = times_v(zero_out(), words_0(words), desc_v, 0)
        part = times_v(part, words_1(words), desc_v + 2, 1)
        part = times_v(part, words_2(words), desc_v + 4, 1)
        part = times_v(part, words_3(words), desc_v + 6, 1)
        wgmma_commit()
        return part

    @device
    def consume(smem, tile, wg_idx, scale_q, scale_k, scale_v, left, right, c):
        """The sums of both halves of the channels, the unit that they are multiples of, and the softmax's state."""
        _, _, first, last, whole_first, whole_last, count, diagonal, _, _, _, _ = tile
        thread = cuda.threadIdx.x & 127
        lane = thread & 31
        row_in_tile = i32(wg_idx * 64 + (thread >> 5) * 16 + (lane >> 2))
        column = i32(2 * (lane & 3))
        lowest = i32(i32(diagonal + row_in_tile) - i32(left + column))
        highest = i32(i32(diagonal + row_in_tile) + i32(right - column))
        end = i32(i32(count - 1) - column)
        query_factor = from_bits(load_4_if(scale_q, True)) * c
        desc_q = descriptor(smem + q_offset + wg_idx * (64 * 128))
        state = START
        out, out_high = zero_out(), zero_out()
        unit = _ONE
        next_key_scale = from_bits(load_4_if(scale_k + i64(first) * 4, first < last))
        next_value_scale = from_bits(load_4_if(scale_v + i64(first) * 4, first < last))
        stage_idx, phase = i32(0), i32(0)
        if wg_idx == 1:  # the first turn is the other's
            named_barrier_arrive(_TURN, 256)
        mbarrier_wait(smem + full_q, 0)
        for j in range(first, last):
            factor = float_max(query_factor * next_key_scale, _SMALLEST)  # at 0, what is hidden would be -inf 0, NaN
            value_scale = next_value_scale
            # Coherent loads, which stay in front of the barriers: those of the next tile, a whole tile ahead.
            ahead = i64(min(i32(j + 1), i32(last - 1))) * 4
            next_key_scale, next_value_scale = load_f32(scale_k + ahead), load_f32(scale_v + ahead)
            desc_k = descriptor(smem + k_offset + stage_idx * k_bytes)
            desc_v = descriptor(smem + v_offset + stage_idx * v_bytes)
            mbarrier_wait(smem + full_k + 8 * stage_idx, phase)
            named_barrier(_TURN + wg_idx, 256)
            wgmma_fence()
            scores = scores_of(zero_scores(), desc_q, desc_k)
            wgmma_commit()
            scores = scores_done(scores)
            named_barrier_arrive(_TURN + 1 - wg_idx, 256)
            if thread == 0:
                mbarrier_arrive(smem + empty_k + 8 * stage_idx)
            if j < whole_first or j >= whole_last:
                start = i32(j * ROWS)
                scores = hide(
                    scores,
                    i32(lowest - start), i32(min(highest, end) - start),
                    i32(i32(lowest + 8) - start), i32(min(i32(highest + 8), end) - start),
                )  # fmt: skip
            words, state, alpha, alpha_below = softmax(scores, factor, state)
            mbarrier_wait(smem + full_v + 8 * stage_idx, phase)
            part = part_done(issue_values(words, desc_v))
            usual = _LEAST_UNIT <= value_scale <= _LARGEST_UNIT
            ratio = _ONE
            if usual:
                ratio = unit * reciprocal_approx(value_scale)
                unit = value_scale
            else:
                part = scaled(part, value_scale * reciprocal_approx(unit))
            out = rescale_add(out, part, alpha * ratio, alpha_below * ratio)
            if two_halves:
                part = part_done(issue_values(words, desc_v + (_PANEL >> 4)))
                if not usual:
                    part = scaled(part, value_scale * reciprocal_approx(unit))
                out_high = rescale_add(out_high, part, alpha * ratio, alpha_below * ratio)
            if thread == 0:
                mbarrier_arrive(smem + empty_v + 8 * stage_idx)
            stage_idx, phase = next_stage(stage_idx, phase)
        return out, out_high, unit, state

    @device
    def work_of(block, table, heads, group):
        """A block's tile of queries and its heads: of all heads the tiles with most to do come first."""
        tile_idx = quotient(block, heads)
        head = i32(block - tile_idx * heads)
        return load_tile(table, tile_idx), head, quotient(head, group)

    def attention_forward(
        map_q, map_k, map_v, table, scale_q, scale_k, scale_v, out, m, l,  # noqa: E741
        heads, group, rows_q, rows_k, left, right, c, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        grid_constant_params()
        maps = address_of(map_q), address_of(map_k), address_of(map_v)
        smem = dynamic_shared()
        wg_idx, warp = shfl_sync_0(cuda.threadIdx.x >> 7), shfl_sync_0(cuda.threadIdx.x >> 5)
        if cuda.threadIdx.x == 0:
            prefetch_tensormap(maps[0])
            prefetch_tensormap(maps[1])
            prefetch_tensormap(maps[2])
            mbarrier_init(smem + full_q, 1)
            for stage in range(stages):
                mbarrier_init(smem + full_k + 8 * stage, 1)
                mbarrier_init(smem + full_v + 8 * stage, 1)
                mbarrier_init(smem + empty_k + 8 * stage, 2)
                mbarrier_init(smem + empty_v + 8 * stage, 2)
            fence_mbarrier_init()
        cuda.syncthreads()
        tile, head, kv_head = work_of(cuda.blockIdx.x, table, heads, group)
        if wg_idx == 2:
            warpgroup_reg_dealloc(_PRODUCER_REGISTERS)
            if warp == 8 and elect_sync():
                produce(smem, maps, tile, head, kv_head, rows_q, rows_k)
        else:
            warpgroup_reg_alloc(_REGISTERS)
            query_block = i64(head) * (rows_q >> 7) + (tile[0] >> 7)
            key_block = i64(kv_head) * (rows_k >> 7) + (tile[1] >> 7)
            acc, acc_high, unit, state = consume(
                smem, tile, wg_idx, scale_q + query_block * 4, scale_k + key_block * 4, scale_v + key_block * 4,
                left, right, c,
            )  # fmt: skip
            # Found again: kept, they would take registers from the loop.
            tile, head, _ = work_of(shfl_sync_0(cuda.blockIdx.x), table, heads, group)
            row, _, _, _, _, _, _, _, valid, sequence, out_row, out_rows = tile
            lane = cuda.threadIdx.x & 31
            warp_row = warp * 16
            line = warp_row + (lane >> 2)
            largest, largest_below, row_unit, row_unit_below, total, total_below = state
            total, total_below = quad_sum(total), quad_sum(total_below)
            inverse, inverse_below = unit * reciprocal_approx(total), unit * reciprocal_approx(total_below)
            seen, largest, total = row_result(largest, row_unit, total, line < valid)
            seen_below, largest_below, total_below = row_result(
                largest_below, row_unit_below, total_below, line + 8 < valid
            )
            if lane & 3 == 0:
                place = (i64(head) * rows_q + row + line) * 4
                store_f32(m + place, largest)
                store_f32(m + place + 32, largest_below)
                store_f32(l + place, total)
                store_f32(l + place + 32, total_below)
            first_row = i64(sequence) * stride_b + i64(out_row + warp_row) * stride_l + i64(head) * stride_h
            shared = smem + out_offset + warp * WARP_BYTES
            store_rows(
                finish(acc, inverse, inverse_below, seen, seen_below),
                shared, out + first_row * item, stride_l * item, out_rows - warp_row, lane,
            )  # fmt: skip
            if two_halves:
                store_more_rows(
                    finish(acc_high, inverse, inverse_below, seen, seen_below),
                    shared, out + first_row * item + half_bytes, stride_l * item, out_rows - warp_row, lane,
                )  # fmt: skip

    return Kernel(
        f"attention_forward({spec}, {stages=})",
        attention_forward,
        (*[tensor_map] * 3, *[i64] * 7, *[i32] * 6, f32, *[i64] * 3),
        384,
        shared_bytes=offsets["end"],
        architectures=("90a",),
    )
