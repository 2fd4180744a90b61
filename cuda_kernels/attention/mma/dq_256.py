"""dQ without wgmma for heads with 256 channels, 128 channels of the result per block.

A thread has registers for sums of 128 channels besides dS of a tile. Each half of the result has its own block, which
recomputes dS: ten products of 128 channels per tile instead of six.

Codes of Q and dO take 64 KB of a block's 99 KB. The keys of a tile pass through a ring of two stages: K and V of 32
keys four times, then 128 channels of transposed K for all of them; one stage is copied while the other is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.mma.dq import KEYS, dq_pass, make_gradients_of, make_rounded
from cuda_kernels.attention.mma.operands import CHANNELS, LINE, TILE, make_copy, make_row_copy, scale_invs_of_block
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.mma.results import own_place
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.tiles import visible_columns, visited_tiles
from cuda_kernels.device.fragments import zeros
from cuda_kernels.device.language import cuda, device, f32, i32, i64
from cuda_kernels.device.ptx import cp_async_commit, cp_async_wait
from cuda_kernels.device.swizzle import ldmatrix_a, ldmatrix_b
from cuda_kernels.kernel import Kernel

_STAGE = CHANNELS * LINE
"""Bytes of transposed K of a tile, or of K and V of :data:`~cuda_kernels.attention.mma.dq.KEYS` keys."""


@cache
def make_wide_dq(spec: AttentionSpec) -> Kernel:
    """``dq`` of the reference's ``backward``, in ``spec.out_dtype``, and ``CORRECTED``.

    Parameters are those of :func:`cuda_kernels.attention.mma.dq.mma_attention_dq_kernel`; a tile of a head has two
    consecutive blocks.
    """
    head_dim, panels = spec.head_dim, spec.panels
    do_offset, ring, v_offset = panels * TILE, 2 * panels * TILE, panels * KEYS * LINE
    copy_rows, copy_some, copy_columns = (
        make_row_copy(ROWS, head_dim),
        make_row_copy(KEYS, head_dim),
        make_copy(CHANNELS, ROWS),
    )
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
