"""Tiles: a block's entry in the table made by the host, and the columns visible to its rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.spec import (
    TILE_COUNT,
    TILE_DIAGONAL,
    TILE_FIRST,
    TILE_LAST,
    TILE_WHOLE_FIRST,
    TILE_WHOLE_LAST,
)
from cuda_kernels.device.fragments import mask_rows
from cuda_kernels.device.language import cuda, device, f32, i32, i64, tensor_map
from cuda_kernels.device.ptx import load_16_if, quotient
from cuda_kernels.device.sm90 import shfl_sync_0
from cuda_kernels.kernel import typed


def parameters_of_pass(maps: str, addresses: str, factors: str) -> dict[str, Any]:
    """The types of a kernel's parameters by name: tensor maps, addresses, sizes and the band, factors, strides."""
    return {
        **typed(tensor_map, maps),
        **typed(i64, addresses),
        **typed(i32, "heads_at_once group rows_q rows_k left right"),
        **typed(f32, factors),
        **typed(i64, "stride_b stride_l stride_h"),
    }


@device
def load_tile(table, index):
    """Entry ``index`` of the table of tiles: twelve int32, see :data:`cuda_kernels.attention.spec.TILE_FIELDS`.

    They are made uniform for the compiler, so that loops over tiles are uniform.
    """
    address = table + i64(index) * 48
    a, b, c = load_16_if(address, True), load_16_if(address + 16, True), load_16_if(address + 32, True)
    return (
        shfl_sync_0(i32(a[0])), shfl_sync_0(i32(a[1])), shfl_sync_0(i32(a[2])), shfl_sync_0(i32(a[3])),
        shfl_sync_0(i32(b[0])), shfl_sync_0(i32(b[1])), shfl_sync_0(i32(b[2])), shfl_sync_0(i32(b[3])),
        shfl_sync_0(i32(c[0])), shfl_sync_0(i32(c[1])), shfl_sync_0(i32(c[2])), shfl_sync_0(i32(c[3])),
    )  # fmt: skip


@device
def located(block, section, table, heads_at_once):
    """The tile and the head of a block of a section."""
    tile_idx = quotient(block, heads_at_once)
    return load_tile(table, tile_idx), i32(section * heads_at_once + block - tile_idx * heads_at_once)


@device
def tile_of(table, heads_at_once):
    """A block's tile and head.

    The grid is ``[tiles * heads_at_once, heads / heads_at_once]``. Each of its sections has all tiles of some heads,
    those with the most work first. GPUs start blocks in the order of the first dimension, then the second, though CUDA
    does not promise it; so the operands of one section replace those of the one before in the L2 cache.
    """
    return located(cuda.blockIdx.x, cuda.blockIdx.y, table, heads_at_once)


@device
def tile_again(table, heads_at_once):
    """A block's tile and head, loaded again after a loop, so that they do not occupy registers in it."""
    return located(shfl_sync_0(cuda.blockIdx.x), shfl_sync_0(cuda.blockIdx.y), table, heads_at_once)


@device
def block_index():
    """The index of a block in the grid."""
    return i32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)


@device
def visited_tiles(tile):
    """``first, last, whole_first, whole_last`` of a tile: see :data:`cuda_kernels.attention.spec.TILE_FIELDS`."""
    return tile[TILE_FIRST], tile[TILE_LAST], tile[TILE_WHOLE_FIRST], tile[TILE_WHOLE_LAST]


@device
def visible_columns(tile, row_in_tile, col_in_tile, left, right):
    """Columns visible to row ``row_in_tile``: the first and the last one, and the last existing one.

    They are relative to ``col_in_tile``, this thread's first column.
    """
    count, diagonal = tile[TILE_COUNT], tile[TILE_DIAGONAL]
    lowest = i32(i32(diagonal + row_in_tile) - i32(left + col_in_tile))
    highest = i32(i32(diagonal + row_in_tile) + i32(right - col_in_tile))
    return lowest, highest, i32(i32(count - 1) - col_in_tile)


@cache
def make_band_mask(num_registers: int) -> Any:
    """A device function ``(scores, visible, start) -> scores`` that writes -inf to hidden columns.

    ``visible``: :func:`visible_columns` of the first of the thread's two rows. ``start``: the first column of the
    scores.
    """
    hide = mask_rows(num_registers)

    @device
    def mask(scores, visible, start):
        lowest, highest, end = visible
        return hide(
            scores,
            i32(lowest - start), i32(min(highest, end) - start),
            i32(i32(lowest + 8) - start), i32(min(i32(highest + 8), end) - start),
        )  # fmt: skip

    return mask
