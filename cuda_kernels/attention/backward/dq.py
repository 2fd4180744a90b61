"""dQ of FP8 attention on Hopper: rows are queries; a producer warp copies with TMA, two warpgroups multiply.

A block processes 128 queries of one head, 64 per warpgroup. Their codes of Q and dO stay in shared memory. It loops
over the keys they attend to, 128 at a time: K, V and transposed K are in a ring of stages. For each tile a warpgroup
computes S = Q Kᵀ and dP = dO Vᵀ, turns them into dS in registers, scales each row of dS by 448 over its largest
magnitude, and multiplies it, from registers, with K. The product is scaled and added in float32, so that the tensor
cores' short accumulator (about 14 bits, DeepSeek-V3, arXiv:2412.19437) never sums more than 128 products.

Up to 128 channels, the next tile's product for S runs during this tile's codes of dS, and its product for dP during its
exponentials (:mod:`.dq_tiles`). The warpgroups are not synchronized. The rows of dS are also summed. With exact
arithmetic these sums are 0; :mod:`.dkv` corrects D by them. Numerics: the reference's ``_dq``.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.attention.backward.dq_tiles import make_tiles, make_wide_tiles
from cuda_kernels.attention.backward.statistics import (
    CORRECTED,
    DELTA,
    GRADIENT_SCALE_INV,
    QUERY_SCALE_INV,
    STATISTICS,
    TOTAL,
)
from cuda_kernels.attention.block import PRODUCER, attention_on_hopper, make_own_load, make_warp_specialized
from cuda_kernels.attention.products import thread_again
from cuda_kernels.attention.softmax import quad_sum
from cuda_kernels.attention.spec import TILE_OTHERS, TILE_ROW, AttentionSpec
from cuda_kernels.attention.tiles import parameters_of_pass, tile_again
from cuda_kernels.device.language import cuda, device, i64
from cuda_kernels.device.ptx import dynamic_shared, load_f32, quotient, store_f32
from cuda_kernels.device.sm90 import address_of, mbarrier_init
from cuda_kernels.kernel import Kernel

_ZERO = np.float32(0)


@cache
def attention_dq_kernel(spec: AttentionSpec) -> Kernel:
    """``dq`` of the reference's ``backward``, in ``spec.out_dtype``, and ``CORRECTED``.

    Parameters are the tensor maps of Q's, dO's, K's and V's codes and of the transposed codes of K; the addresses of
    the table of tiles, of the ``scale_inv`` of K and V, of the statistics (:mod:`.statistics`) and of dq; the number of
    heads at once, and of query heads per head of K and V, the packed rows of queries and of keys, the band's limits;
    the softmax scale times log2(e), which is positive, and the softmax scale; and the strides of dq in elements,
    between sequences, rows and heads. The grid is that of :func:`cuda_kernels.attention.tiles.tile_of`.
    """
    wide, reload = spec.panels > 1, spec.head_dim >= 128
    tiles = make_wide_tiles(spec) if wide else make_tiles(spec)
    offsets, stages, init_ring, load_keys, consume, store = tiles
    q_offset, do_offset, out_offset, full_q = (offsets[name] for name in ("q", "do", "out", "full_q"))
    load_own = make_own_load(spec.panels)

    @device
    def init_barriers(smem):
        mbarrier_init(smem + full_q, 1)
        init_ring(smem)

    @device
    def produce(smem, maps, tile, head, shape):
        group, rows_q, rows_k = shape
        load_own(smem + q_offset, maps[0], smem + do_offset, maps[1], smem + full_q, head * rows_q + tile[TILE_ROW])
        load_keys(smem, maps[2], maps[3], maps[4], tile, quotient(head, group), rows_k)

    begin = make_warp_specialized(init_barriers, produce)

    def attention_dq(
        map_q, map_do, map_k, map_v, map_kt, table, scale_inv_k, scale_inv_v, statistics, out,
        heads_at_once, group, rows_q, rows_k, left, right, c, softmax_scale, stride_b, stride_l, stride_h,
    ):  # fmt: skip
        maps = address_of(map_q), address_of(map_do), address_of(map_k), address_of(map_v), address_of(map_kt)
        smem = dynamic_shared()
        tile, head, wg_idx, warp = begin(smem, maps, table, heads_at_once, (group, rows_q, rows_k))
        if wg_idx != PRODUCER:
            lane = cuda.threadIdx.x & 31
            row_in_tile = warp * 16 + (lane >> 2)
            mine = statistics + (i64(head) * STATISTICS * rows_q + tile[TILE_ROW] + row_in_tile) * 4
            stat_bytes = i64(rows_q) * 4
            delta, delta_below = load_f32(mine + DELTA * stat_bytes), load_f32(mine + DELTA * stat_bytes + 32)
            row_terms = (
                load_f32(mine + QUERY_SCALE_INV * stat_bytes) * c, load_f32(mine + GRADIENT_SCALE_INV * stat_bytes),
                load_f32(mine + TOTAL * stat_bytes), load_f32(mine + TOTAL * stat_bytes + 32), delta, delta_below,
            )  # fmt: skip
            key_block = i64(quotient(head, group)) * (rows_k >> 7) + (tile[TILE_OTHERS] >> 7)
            dq, rest, rest_below = consume(
                smem, tile, wg_idx, row_terms, scale_inv_k, scale_inv_v, key_block, left, right
            )
            if reload:  # what a thread knows of its rows would not fit into registers in the loop
                tile, head = tile_again(table, heads_at_once)
                thread = thread_again()
                lane, warp = thread & 31, thread >> 5
                row_in_tile = warp * 16 + (lane >> 2)
                mine = statistics + (i64(head) * STATISTICS * rows_q + tile[TILE_ROW] + row_in_tile) * 4
            rest, rest_below = quad_sum(rest), quad_sum(rest_below)
            if lane & 3 == 0:
                store_f32(mine + CORRECTED * stat_bytes, delta + rest)
                store_f32(mine + CORRECTED * stat_bytes + 32, delta_below + rest_below)
            store(dq, softmax_scale, smem + out_offset, out, tile, head, warp, (stride_b, stride_l, stride_h))

    parameters = parameters_of_pass(
        "map_q map_do map_k map_v map_kt", "table scale_inv_k scale_inv_v statistics out", "c softmax_scale"
    )
    return attention_on_hopper(f"attention_dq({spec}, {stages=})", attention_dq, parameters, offsets)
