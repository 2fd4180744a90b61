"""The forward pass without wgmma over the keys, for heads with 256 channels and 128 channels of the result.

A thread has registers for sums of 128 channels besides the scores of a tile. Each half of the result has its own
launch, which recomputes the scores: three products per tile instead of two.

Codes of Q and of a tile of K take 32 KB each, and those of a half of transposed V 16 KB, of a block's 99 KB. So V is
copied while scores are computed, and the next tile's K while P is multiplied.
"""

from __future__ import annotations

from typing import Any

from cuda_kernels.attention.backward.statistics import SMALLEST
from cuda_kernels.attention.mma.operands import CHANNELS, LINE, TILE, make_copy, make_row_copy, scale_invs_of_block
from cuda_kernels.attention.mma.products import STEP, make_add_product, make_product
from cuda_kernels.attention.mma.results import own_place
from cuda_kernels.attention.softmax import START, make_whole_softmax
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.tiles import make_band_mask, visible_columns, visited_tiles
from cuda_kernels.device.fragments import scale_rows, zeros
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import cp_async_commit, cp_async_wait, float_max
from cuda_kernels.device.swizzle import ldmatrix_a, ldmatrix_b


def make_wide_attend(spec: AttentionSpec, first_channel: int) -> tuple[Any, int]:
    """``attend`` of :mod:`cuda_kernels.attention.mma.forward`, and the size of its shared memory in bytes.

    Args:
        spec: compile-time options.
        first_channel: the first channel of the half of V.
    """
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
