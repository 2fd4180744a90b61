"""FP8 attention's forward pass without wgmma: eight warps, with 16 queries each, share tiles of keys.

A block processes 128 queries of one head, and loops over the keys they attend to, 128 at a time. Codes of K and
transposed V are in a ring of stages in shared memory: the next tile is copied while one is multiplied. A warp turns its
scores into codes of P in registers, which are directly the left operand of P V: the order of keys in transposed copies,
chosen for wgmma's registers, also fits mma's, which have the same layout.

Each tile's product with V is a separate sum, added in float32, because the tensor cores' accumulator of FP8 products is
short here as well (22 bits in all, SageAttention2, arXiv:2411.10958, section 3.3). Numerics: the reference's
``forward``.

**With 256 channels** a thread has registers for sums of 128 besides the scores of a tile. Each half of the result has
its own launch, which recomputes the scores: three products per tile instead of two. Codes of Q and of a tile of K take
32 KB each, and those of a half of transposed V 16 KB, of a block's 99 KB. So V is copied while scores are computed, and
the next tile's K while P is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.mma.operands import (
    CHANNELS,
    LINE,
    TILE,
    attention_by_mma,
    make_copy,
    make_row_copy,
    own_place,
    scale_invs_of_block,
)
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.softmax import START, make_whole_softmax, store_statistics
from cuda_kernels.attention.spec import (
    ROWS,
    TILE_OTHERS,
    TILE_OUT_ROW,
    TILE_OUT_ROWS,
    TILE_ROW,
    TILE_SEQUENCE,
    AttentionSpec,
)
from cuda_kernels.attention.tiles import (
    make_band_mask,
    parameters_of_pass,
    tile_again,
    tile_of,
    visible_columns,
    visited_tiles,
)
from cuda_kernels.device.fragments import scale_rows, scale_seen_rows, store_fragment_global, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import cp_async_commit, cp_async_wait, dynamic_shared, float_max, load_f32, quotient
from cuda_kernels.device.swizzle import ldmatrix_a, ldmatrix_b
from cuda_kernels.kernel import Kernel

STAGES = {64: 3, 96: 2, 128: 2}
"""Stages of the ring of keys and values, by channels of a head."""


@cache
def mma_attention_forward_kernel(spec: AttentionSpec, first_channel: int = 0) -> Kernel:
    """``o`` and the statistics ``m`` and ``l`` of the reference's ``forward``.

    Parameters are those of :func:`cuda_kernels.attention.forward.attention_forward_kernel`, with addresses instead of
    tensor maps.

    Args:
        spec: compile-time options.
        first_channel: the first of at most :data:`CHANNELS` channels of ``o`` that a launch computes.
    """
    if spec.panels > 1:
        name = f"mma_attention_forward({spec}, {first_channel=})"
        return _forward_pass(spec, name, *_make_wide_attend(spec, first_channel), first_channel)
    stages, head_dim = STAGES[spec.head_dim], spec.head_dim
    prefetch, pending = stages - 1, stages - 2
    stage_bytes = TILE + head_dim * LINE
    scores_count, acc_count = ROWS // 2, head_dim // 2
    copy_rows, copy_values = make_copy(ROWS, head_dim), make_copy(head_dim, ROWS)
    scores_of = make_product(ROWS, spec.k_steps)
    hide, softmax = make_band_mask(scores_count), make_whole_softmax(ROWS)
    rescale, add_product = scale_rows(acc_count), make_add_product(head_dim, ROWS // STEP)
    zero_acc = zeros(acc_count)

    @device
    def copy_keys(stage, k, j):
        copy_rows(stage, k + i64(j) * (ROWS * head_dim), i64(head_dim))

    @device
    def next_stage(stage, first_stage):
        """The address of the next stage in the ring."""
        return i32(stage + stage_bytes) if stage < first_stage + prefetch * stage_bytes else first_stage

    @device
    def attend(smem, tile, q, k, v_t, rows_k, query_factor, scale_invs, key_block, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        visible = visible_columns(tile, i32(warp * 16 + (lane >> 2)), i32(2 * (lane & 3)), left, right)
        first_stage = i32(smem + TILE)
        in_a, in_b = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane)), i32(ldmatrix_b(lane))
        acc_o, softmax_state = zero_acc(), START
        if first_tile < last_tile:
            copy_rows(smem, q, i64(head_dim))
        for ahead in range(prefetch):
            if first_tile + ahead < last_tile:
                stage = first_stage + ahead * stage_bytes
                copy_keys(stage, k, first_tile + ahead)
                copy_values(stage + TILE, v_t + i64(first_tile + ahead) * ROWS, rows_k)
            cp_async_commit()
        stage, free_stage = first_stage, i32(first_stage + prefetch * stage_bytes)
        for j in range(first_tile, last_tile):
            cp_async_wait(pending)
            cuda.syncthreads()  # the tile has arrived, and all threads have multiplied the previous one
            if j + prefetch < last_tile:
                copy_keys(free_stage, k, j + prefetch)
                copy_values(free_stage + TILE, v_t + i64(j + prefetch) * ROWS, rows_k)
            cp_async_commit()
            # Loaded here, they arrive during the products.
            key_scale_inv, value_scale_inv = scale_invs_of_block(scale_invs, i32(key_block + j))
            scores = scores_of(in_a, stage + in_b)
            if j < whole_first or j >= whole_last:
                scores = hide(scores, visible, i32(j * ROWS))
            factor = float_max(query_factor * key_scale_inv, SMALLEST)
            words, softmax_state, alphas = softmax(scores, factor, softmax_state)
            acc_o = rescale(acc_o, alphas[0], alphas[1])
            acc_o = add_product(acc_o, words, stage + TILE + in_b, value_scale_inv, value_scale_inv)
            stage, free_stage = next_stage(stage, first_stage), stage
        return acc_o, softmax_state

    name = f"mma_attention_forward({spec}, {stages=})"
    return _forward_pass(spec, name, attend, TILE + stages * stage_bytes)


def _make_wide_attend(spec: AttentionSpec, first_channel: int) -> tuple[Any, int]:
    """``attend`` of :func:`_forward_pass` with 256 channels, and the size of its shared memory in bytes."""
    head_dim, panels = spec.head_dim, spec.panels
    k_offset, v_offset = panels * TILE, 2 * panels * TILE
    copy_rows, copy_values = make_row_copy(ROWS, head_dim), make_copy(CHANNELS, ROWS)
    scores_of = make_product(ROWS, spec.k_steps, panels=panels)
    hide, softmax, zero_acc = make_band_mask(ROWS // 2), make_whole_softmax(ROWS), zeros(CHANNELS // 2)
    rescale, add_product = scale_rows(CHANNELS // 2), make_add_product(CHANNELS, ROWS // STEP)

    @device
    def attend(smem, tile, q, k, v_t, rows_k, query_factor, scale_invs, key_block, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        own_row, own_column = own_place()
        visible = visible_columns(tile, own_row, own_column, left, right)
        in_a, in_b = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane)), i32(smem + ldmatrix_b(lane))
        acc_o, softmax_state = zero_acc(), START
        v_t += first_channel * rows_k
        if first_tile < last_tile:
            copy_rows(smem, q, i64(head_dim))
            copy_rows(smem + k_offset, k + i64(first_tile) * (ROWS * head_dim), i64(head_dim))
        cp_async_commit()
        for j in range(first_tile, last_tile):
            cp_async_wait(0)
            cuda.syncthreads()  # K has arrived, and the product with the last V is done
            copy_values(smem + v_offset, v_t + i64(j) * ROWS, rows_k)
            cp_async_commit()
            # Loaded here, they arrive during the products.
            key_scale_inv, value_scale_inv = scale_invs_of_block(scale_invs, i32(key_block + j))
            scores = scores_of(in_a, in_b + k_offset)
            if j < whole_first or j >= whole_last:
                scores = hide(scores, visible, i32(j * ROWS))
            words, softmax_state, alphas = softmax(
                scores, float_max(query_factor * key_scale_inv, SMALLEST), softmax_state
            )
            cp_async_wait(0)
            cuda.syncthreads()  # V has arrived, and all threads are done with K
            if j + 1 < last_tile:
                copy_rows(smem + k_offset, k + i64(j + 1) * (ROWS * head_dim), i64(head_dim))
            cp_async_commit()
            acc_o = add_product(
                rescale(acc_o, alphas[0], alphas[1]), words, in_b + v_offset, value_scale_inv, value_scale_inv
            )
        return acc_o, softmax_state

    return attend, v_offset + CHANNELS * LINE


def _forward_pass(spec: AttentionSpec, name: str, attend: Any, shared_bytes: int, first_channel: int = 0) -> Kernel:
    """The forward pass that loops over the keys by ``attend``.

    Args:
        spec: compile-time options.
        name: the kernel's name.
        attend: a device function ``(smem, tile, q, k, v_t, rows_k, query_factor, scale_invs, key_block, left, right) ->
            acc_o, softmax_state``: the sums of this thread's channels, in units of the softmax's state, and that state.
            ``q``, ``k``, ``v_t``: addresses of the tile's first codes, and of the sequence's. ``query_factor``: Q's
            ``scale_inv`` times c. ``key_block``: the sequence's first block of the ``scale_invs`` of K and V.
        shared_bytes: the shared memory of a block, in bytes.
        first_channel: see :func:`mma_attention_forward_kernel`.
    """
    head_dim, channels, item = spec.head_dim, min(spec.head_dim, CHANNELS), 4 if spec.out_dtype == "float32" else 2
    finish = scale_seen_rows(channels // 2)
    store = store_fragment_global(channels // 2, spec.out_dtype, True, False)

    def mma_attention_forward(
        q, k, v_t, table, scale_inv_q, scale_inv_k, scale_inv_v, out, m, l,  # noqa: E741
        heads_at_once, group, rows_q, rows_k, left, right, c, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        smem = dynamic_shared()
        tile, head = tile_of(table, heads_at_once)
        kv_head = quotient(head, group)
        packed_row, others = tile[TILE_ROW], tile[TILE_OTHERS]
        query_block = (i64(head) * (rows_q >> 7) + (packed_row >> 7)) * 4
        key_block = i32(kv_head * (rows_k >> 7) + (others >> 7))
        acc_o, softmax_state = attend(
            smem, tile,
            q + (i64(head) * rows_q + packed_row) * head_dim,
            k + (i64(kv_head) * rows_k + others) * head_dim,
            v_t + i64(kv_head) * head_dim * rows_k + others,
            i64(rows_k), load_f32(scale_inv_q + query_block) * c, (scale_inv_k, scale_inv_v), key_block, left, right,
        )  # fmt: skip
        tile, head = tile_again(table, heads_at_once)
        sequence, out_row, out_rows = tile[TILE_SEQUENCE], tile[TILE_OUT_ROW], tile[TILE_OUT_ROWS]
        lane = cuda.threadIdx.x & 31
        row_in_tile = i32((cuda.threadIdx.x >> 5) * 16 + (lane >> 2))
        inverse, inverse_below, seen, seen_below = store_statistics(
            softmax_state, m, l, tile, head, rows_q, row_in_tile, lane
        )
        place = i64(sequence) * stride_b + i64(out_row) * stride_l + i64(head) * stride_h
        store(
            finish(acc_o, inverse, inverse_below, seen, seen_below),
            out + (place + first_channel) * item, stride_l, row_in_tile, out_rows, i32(2 * (lane & 3)), i32(channels),
        )  # fmt: skip

    parameters = parameters_of_pass("", "q k v_t table scale_inv_q scale_inv_k scale_inv_v out m l", "c")
    return attention_by_mma(name, mma_attention_forward, parameters, shared_bytes)
