"""A warp's rows of a gradient: their position, and their store from registers to global memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.mma.operands import CHANNELS
from cuda_kernels.attention.spec import TILE_OUT_ROW, TILE_OUT_ROWS, TILE_SEQUENCE, TILE_VALID, AttentionSpec
from cuda_kernels.attention.tiles import located
from cuda_kernels.device.fragments import scale_seen_rows, store_fragment_global
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.sm90 import shfl_sync_0


@device
def own_place():
    """The first of this thread's two rows in the block's tile, and its first column of a result or of scores."""
    lane = cuda.threadIdx.x & 31
    return i32((cuda.threadIdx.x >> 5) * 16 + (lane >> 2)), i32(2 * (lane & 3))


@cache
def make_part_of(head_dim: int) -> tuple[Any, Any]:
    """Device functions ``(table, heads_at_once) -> tile, head, first_channel``: a block's part of a gradient.

    The second function is for after a loop: it loads all again, so that they do not occupy registers in it.

    If a head has more channels than a block computes, consecutive blocks share a tile, so that the second one finds
    most of its operands in the cache. The grid is that of :func:`cuda_kernels.attention.tiles.tile_of`, with these
    blocks in the first dimension.
    """
    shift = (head_dim // CHANNELS).bit_length() - 1 if head_dim > CHANNELS else 0

    @device
    def part(block, section, table, heads_at_once):
        tile, head = located(i32(block >> shift), section, table, heads_at_once)
        return tile, head, i32((block & ((1 << shift) - 1)) * CHANNELS)

    @device
    def part_of(table, heads_at_once):
        return part(cuda.blockIdx.x, cuda.blockIdx.y, table, heads_at_once)

    @device
    def part_again(table, heads_at_once):
        return part(shfl_sync_0(cuda.blockIdx.x), shfl_sync_0(cuda.blockIdx.y), table, heads_at_once)

    return part_of, part_again


@cache
def make_gradient_store(spec: AttentionSpec) -> Any:
    """A device function ``(acc, factor, out, tile, head, first_channel, strides)`` that stores a warp's sums.

    Rows beyond the sequence are 0. ``out``: the address of the result in ``out_dtype``; ``strides``: its strides in
    elements, between sequences, rows and heads.
    """
    channels, item = min(spec.head_dim, CHANNELS), 4 if spec.out_dtype == "float32" else 2
    num_registers = channels // 2
    finish = scale_seen_rows(num_registers)
    store_rows = store_fragment_global(num_registers, spec.out_dtype, True, False)

    @device
    def store(acc, factor, out, tile, head, first_channel, strides):
        sequence, out_row, out_rows = tile[TILE_SEQUENCE], tile[TILE_OUT_ROW], tile[TILE_OUT_ROWS]
        valid = tile[TILE_VALID]
        stride_b, stride_l, stride_h = strides
        own_row, own_column = own_place()
        place = i64(sequence) * stride_b + i64(out_row) * stride_l + i64(head) * stride_h + first_channel
        acc = finish(acc, factor, factor, own_row < valid, own_row + 8 < valid)
        store_rows(acc, out + place * item, stride_l, own_row, out_rows, own_column, i32(channels))

    return store
