"""dQ of FP8 attention without wgmma: rows are queries; eight warps, with 16 queries each, share tiles of keys.

A block processes 128 queries of one head. Their codes of Q and dO stay in shared memory. It loops over the keys they
attend to, 128 at a time, with space for one tile of K, V and transposed K. The last is copied while scores are
computed, the next tile's K and V while dS is multiplied. Scores and dP are computed for some keys at a time, so that
only dS is in registers for all of them. Each row of dS is scaled by 448 over its largest magnitude, and is, from
registers, the left operand of the product with K, which is scaled and added in float32.

The rows of dS are also summed; see :mod:`cuda_kernels.attention.backward.dq`. Numerics: the reference's ``_dq``.

**With 256 channels** a thread has registers for sums of 128 besides dS of a tile. Each half of the result has its own
block, which recomputes dS: ten products of 128 channels per tile instead of six. Codes of Q and dO take 64 KB of a
block's 99 KB. The keys of a tile pass through a ring of two stages: K and V of 32 keys four times, then 128 channels of
transposed K for all of them; one stage is copied while the other is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.backward.running_scale import make_row_codes, tile_scales
from cuda_kernels.attention.backward.statistics import (
    CORRECTED,
    DELTA,
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
    make_copy,
    make_gradient_store,
    make_part_of,
    make_row_copy,
    own_place,
    scale_invs_of_block,
)
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.softmax import quad_sum
from cuda_kernels.attention.spec import ROWS, TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.tiles import make_band_mask, parameters_of_pass, visible_columns, visited_tiles
from cuda_kernels.device.fragments import (
    exp2_rows,
    rows_amax,
    rows_sum,
    score_gradients_rows,
    zeros,
)
from cuda_kernels.device.language import cuda, device, f32, i32, i64
from cuda_kernels.device.ptx import (
    cp_async_commit,
    cp_async_wait,
    dynamic_shared,
    float_max,
    load_f32,
    quotient,
    store_f32,
)
from cuda_kernels.device.swizzle import ldmatrix_a, ldmatrix_b
from cuda_kernels.kernel import Kernel

KEYS = 32
"""Keys whose scores and dP are in registers at a time."""
_STAGE = CHANNELS * LINE
"""With 256 channels, bytes of transposed K of a tile, or of K and V of :data:`KEYS` keys."""


@cache
def mma_attention_dq_kernel(spec: AttentionSpec) -> Kernel:
    """``dq`` of the reference's ``backward``, in ``spec.out_dtype``, and ``CORRECTED``.

    Parameters are those of :func:`cuda_kernels.attention.backward.dq.attention_dq_kernel`, with addresses instead of
    tensor maps; with 256 channels a tile of a head has two consecutive blocks.
    """
    if spec.panels > 1:
        return _make_wide_dq(spec)
    head_dim = spec.head_dim
    do_offset, k_offset, v_offset, kt_offset = TILE, 2 * TILE, 3 * TILE, 4 * TILE
    copy_rows, copy_columns = make_copy(ROWS, head_dim), make_copy(head_dim, ROWS)
    gradients_of, add_product = _make_gradients(spec.k_steps), make_add_product(head_dim, ROWS // STEP)
    rounded, zero_sums = make_rounded(ROWS // 2), zeros(head_dim // 2)

    @device
    def copy_keys(smem, k, v, j):
        offset = i64(j) * (ROWS * head_dim)
        copy_rows(smem + k_offset, k + offset, i64(head_dim))
        copy_rows(smem + v_offset, v + offset, i64(head_dim))

    @device
    def attend(smem, tile, operands, row_terms, scale_invs, left, right):
        q, do, k, v, k_t, rows_k = operands
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        query_factor, gradient_scale_inv, total, total_below, delta, delta_below = row_terms
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        own_row, own_column = own_place()
        visible = visible_columns(tile, own_row, own_column, left, right)
        in_q, in_b = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane)), i32(smem + ldmatrix_b(lane))
        dq, rest, rest_below = zero_sums(), f32(0), f32(0)
        if first_tile < last_tile:
            copy_rows(smem, q, i64(head_dim))
            copy_rows(smem + do_offset, do, i64(head_dim))
            copy_keys(smem, k, v, first_tile)
            cp_async_commit()
        for j in range(first_tile, last_tile):
            cp_async_wait(0)
            cuda.syncthreads()  # K and V have arrived, and the product with the last transposed K is done
            copy_columns(smem + kt_offset, k_t + i64(j) * ROWS, rows_k)
            cp_async_commit()
            # Loaded here, they arrive during the products.
            key_scale_inv, value_scale_inv = scale_invs_of_block(scale_invs, j)
            masked = j < whole_first or j >= whole_last
            ds = gradients_of(
                (in_q, in_q + do_offset, in_b + k_offset, in_b + v_offset),
                (query_factor, key_scale_inv, gradient_scale_inv, value_scale_inv),
                (total, total_below, delta, delta_below),
                masked, visible, i32(j * ROWS),
            )  # fmt: skip
            words, unit, unit_below, rest, rest_below = rounded(ds, rest, rest_below)
            cp_async_wait(0)
            cuda.syncthreads()  # transposed K has arrived, and all threads are done with K and V
            if j + 1 < last_tile:
                copy_keys(smem, k, v, j + 1)
            cp_async_commit()
            dq = add_product(dq, words, in_b + kt_offset, unit * key_scale_inv, unit_below * key_scale_inv)
        return dq, rest, rest_below

    return dq_pass(spec, attend, kt_offset + head_dim * LINE)


def dq_pass(spec: AttentionSpec, attend: Any, shared_bytes: int) -> Kernel:
    """The kernel for dQ that loops over the keys by ``attend``.

    Args:
        spec: compile-time options.
        attend: a device function ``(smem, tile, operands, row_terms, scale_invs, left, right) -> dq, rest,
            rest_below``: this thread's dQ, without the softmax scale, and the sums of dS of both rows in its columns.
            ``operands``: addresses of the tile's first codes of Q and dO, of the sequence's of K, V and transposed K,
            from the block's first channel on, and the last one's stride. ``row_terms``: Q's ``scale_inv`` times c,
            dO's, and for both rows the total and D. ``scale_invs``: addresses of those of K and V, from the sequence's
            first on.
        shared_bytes: the shared memory of a block, in bytes.
    """
    head_dim, store = spec.head_dim, make_gradient_store(spec)
    part_of, part_again = make_part_of(head_dim)

    def mma_attention_dq(
        q, do, k, v, k_t, table, scale_inv_k, scale_inv_v, statistics, out,
        heads_at_once, group, rows_q, rows_k, left, right, c, softmax_scale, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        smem = dynamic_shared()
        tile, head, first_channel = part_of(table, heads_at_once)
        kv_head = quotient(head, group)
        packed_row, others = tile[TILE_ROW], tile[TILE_OTHERS]
        row_in_tile, _ = own_place()
        mine = statistics + (i64(head) * STATISTICS * rows_q + packed_row + row_in_tile) * 4
        stat_bytes = i64(rows_q) * 4
        row_terms = (
            load_f32(mine + QUERY_SCALE_INV * stat_bytes) * c, load_f32(mine + GRADIENT_SCALE_INV * stat_bytes),
            load_f32(mine + TOTAL * stat_bytes), load_f32(mine + TOTAL * stat_bytes + 32),
            load_f32(mine + DELTA * stat_bytes), load_f32(mine + DELTA * stat_bytes + 32),
        )  # fmt: skip
        in_q = (i64(head) * rows_q + packed_row) * head_dim
        in_k = (i64(kv_head) * rows_k + others) * head_dim
        in_kt = (i64(kv_head) * head_dim + first_channel) * rows_k + others
        block = (i64(kv_head) * (rows_k >> 7) + (others >> 7)) * 4
        dq, rest, rest_below = attend(
            smem, tile,
            (q + in_q, do + in_q, k + in_k, v + in_k, k_t + in_kt, i64(rows_k)),
            row_terms, (scale_inv_k + block, scale_inv_v + block), left, right,
        )  # fmt: skip
        tile, head, first_channel = part_again(table, heads_at_once)
        mine = statistics + (i64(head) * STATISTICS * rows_q + tile[TILE_ROW] + row_in_tile) * 4
        rest, rest_below = quad_sum(rest), quad_sum(rest_below)
        if cuda.threadIdx.x & 3 == 0 and first_channel == 0:
            store_f32(mine + CORRECTED * stat_bytes, load_f32(mine + DELTA * stat_bytes) + rest)
            store_f32(mine + CORRECTED * stat_bytes + 32, load_f32(mine + DELTA * stat_bytes + 32) + rest_below)
        store(dq, softmax_scale, out, tile, head, first_channel, (stride_b, stride_l, stride_h))

    parameters = parameters_of_pass("", "q do k v k_t table scale_inv_k scale_inv_v statistics out", "c softmax_scale")
    return attention_by_mma(f"mma_attention_dq({spec})", mma_attention_dq, parameters, shared_bytes)


@cache
def make_rounded(num_registers: int) -> Any:
    """A device function ``(ds, rest, rest_below) -> words, unit, unit_below, rest, rest_below``.

    ``ds``: ``num_registers`` registers; ``words``: its codes, an operand A; ``unit``, ``unit_below``: the value of code
    1 in both rows; ``rest``, ``rest_below``: sums of the rows in this thread's columns, to which these are added.
    """
    amax_of, sum_of = rows_amax(num_registers), rows_sum(num_registers)
    codes_of = make_row_codes(num_registers)

    @device
    def rounded(ds, rest, rest_below):
        more, more_below = sum_of(ds)
        rest, rest_below = rest + more, rest_below + more_below
        amax, amax_below = amax_of(ds)
        scale, scale_below, unit, unit_below = tile_scales(amax, amax_below)
        return codes_of(ds, scale, scale_below), unit, unit_below, rest, rest_below

    return rounded


@cache
def _make_gradients(k_steps: int, start: int = 0) -> Any:
    """:func:`make_gradients_of` all keys from ``start`` on, some at a time."""
    product = make_product(KEYS, k_steps, start=start)
    some = make_gradients_of(product, start)
    if start + KEYS == ROWS:
        return some
    others = _make_gradients(k_steps, start + KEYS)

    @device
    def gradients(addresses, scale_invs, row_terms, masked, visible, first_key):
        return some(addresses, scale_invs, row_terms, masked, visible, first_key) + others(
            addresses, scale_invs, row_terms, masked, visible, first_key
        )

    return gradients


def make_gradients_of(product: Any, start: int) -> Any:
    """A device function ``(addresses, scale_invs, row_terms, masked, visible, first_key) -> ds`` of a warp's rows.

    It computes :data:`KEYS` keys, from key ``start`` of the tile on. ``addresses``: of Q, dO, K and V for ldmatrix, the
    arguments of ``product``. ``scale_invs``: of Q times c, of K, dO and V. ``row_terms``: for both rows the total and
    D. ``masked``: whether ``visible`` is used. ``first_key``: the tile's.
    """
    num_registers = KEYS // 2
    hide, exp2 = make_band_mask(num_registers), exp2_rows(num_registers)
    gradients_of = score_gradients_rows(num_registers)

    @device
    def some(addresses, scale_invs, row_terms, masked, visible, first_key):
        in_q, in_do, in_k, in_v = addresses
        query_factor, key_scale_inv, gradient_scale_inv, value_scale_inv = scale_invs
        total, total_below, delta, delta_below = row_terms
        scores = product(in_q, in_k)
        if masked:
            scores = hide(scores, visible, i32(first_key + start))
        factor = float_max(query_factor * key_scale_inv, SMALLEST)
        p = exp2(scores, factor, -total, -total_below)
        return gradients_of(product(in_do, in_v), p, gradient_scale_inv * value_scale_inv, delta, delta_below)

    return some


def _make_wide_dq(spec: AttentionSpec) -> Kernel:
    """:func:`mma_attention_dq_kernel` with 256 channels."""
    head_dim, panels = spec.head_dim, spec.panels
    do_offset, ring, v_offset = panels * TILE, 2 * panels * TILE, panels * KEYS * LINE
    copy_rows, copy_some = make_row_copy(ROWS, head_dim), make_row_copy(KEYS, head_dim)
    copy_columns = make_copy(CHANNELS, ROWS)
    product = make_product(KEYS, spec.k_steps, panels=panels, panel_rows=KEYS)
    add_product = make_add_product(CHANNELS, ROWS // STEP)
    rounded, zero_sums = make_rounded(ROWS // 2), zeros(CHANNELS // 2)

    @device
    def copy_keys(stage, operands, tile_key, key):
        """Copy keys from key ``key`` of the tile on; ``tile_key``: its first."""
        _, _, k, v, _, _ = operands
        offset = (i64(tile_key) + key) * head_dim
        copy_some(stage, k + offset, i64(head_dim))
        copy_some(stage + v_offset, v + offset, i64(head_dim))

    def make_gradients(start: int) -> Any:
        """``make_gradients_of`` for all keys from ``start`` on; meanwhile the next operands are copied."""
        gradients_of = make_gradients_of(product, start)
        is_last = start + KEYS == ROWS

        @device
        def some(ring_of, here, operands, in_a, scale_invs, row_terms, masked, visible, first_key):
            ring_smem, in_b = ring_of
            there = here ^ _STAGE
            cp_async_wait(0)
            cuda.syncthreads()  # these keys have arrived, and all threads are done with the previous operands
            if is_last:
                copy_columns(ring_smem + there, operands[4] + i64(first_key), operands[5])
            else:
                copy_keys(ring_smem + there, operands, first_key, start + KEYS)
            cp_async_commit()
            in_stage = in_b + here
            addresses = in_a, in_a + do_offset, in_stage, in_stage + v_offset
            return gradients_of(addresses, scale_invs, row_terms, masked, visible, first_key)

        if is_last:
            return some
        others = make_gradients(start + KEYS)

        @device
        def gradients(ring_of, here, operands, in_a, scale_invs, row_terms, masked, visible, first_key):
            return some(ring_of, here, operands, in_a, scale_invs, row_terms, masked, visible, first_key) + others(
                ring_of, here ^ _STAGE, operands, in_a, scale_invs, row_terms, masked, visible, first_key
            )

        return gradients

    gradients_of = make_gradients(0)

    @device
    def attend(smem, tile, operands, row_terms, scale_invs, left, right):
        first_tile, last_tile, whole_first, whole_last = visited_tiles(tile)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        own_row, own_column = own_place()
        visible = visible_columns(tile, own_row, own_column, left, right)
        in_a = i32(smem + warp * (16 * LINE) + ldmatrix_a(lane))
        ring_of = i32(smem + ring), i32(smem + ring + ldmatrix_b(lane))
        dq, rest, rest_below = zero_sums(), f32(0), f32(0)
        stage = i32(0)
        if first_tile < last_tile:
            copy_rows(smem, operands[0], i64(head_dim))
            copy_rows(smem + do_offset, operands[1], i64(head_dim))
            copy_keys(smem + ring, operands, first_tile * ROWS, 0)
        cp_async_commit()
        for j in range(first_tile, last_tile):
            # Loaded here, they arrive during the products.
            key_scale_inv, value_scale_inv = scale_invs_of_block(scale_invs, j)
            masked = j < whole_first or j >= whole_last
            ds = gradients_of(
                ring_of, stage, operands, in_a,
                (row_terms[0], key_scale_inv, row_terms[1], value_scale_inv), row_terms[2:],
                masked, visible, i32(j * ROWS),
            )  # fmt: skip
            words, unit, unit_below, rest, rest_below = rounded(ds, rest, rest_below)
            cp_async_wait(0)
            cuda.syncthreads()  # transposed K has arrived, and all threads are done with the last keys
            shared, in_b = ring_of
            if j + 1 < last_tile:
                copy_keys(shared + (stage ^ _STAGE), operands, j * ROWS, ROWS)
            cp_async_commit()
            dq = add_product(dq, words, in_b + stage, unit * key_scale_inv, unit_below * key_scale_inv)
            stage = i32(stage ^ _STAGE)
        return dq, rest, rest_below

    return dq_pass(spec, attend, ring + 2 * _STAGE)
