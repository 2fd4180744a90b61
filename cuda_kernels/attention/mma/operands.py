"""Operands of a warp's products, copied with cp.async to shared memory, its rows of a gradient, and its kernels.

Shared memory has lines of 128 bytes, swizzled (:func:`~cuda_kernels.device.swizzle.swizzle_128b`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cuda_kernels.attention.spec import ROWS, TILE_OUT_ROW, TILE_OUT_ROWS, TILE_SEQUENCE, TILE_VALID, AttentionSpec
from cuda_kernels.attention.tiles import located
from cuda_kernels.device.fragments import scale_seen_rows, store_fragment_global
from cuda_kernels.device.language import cuda, device, i32, i64
from cuda_kernels.device.ptx import cp_async_16, load_f32
from cuda_kernels.device.sm90 import shfl_sync_0
from cuda_kernels.device.swizzle import ROW_BYTES, swizzle_128b
from cuda_kernels.kernel import Kernel

THREADS = 256
"""Threads of a block: eight warps, which all copy and multiply, 16 rows of the result each."""
LINE = ROW_BYTES
"""Bytes of a row in shared memory."""
TILE = ROWS * LINE
"""Bytes of 128 rows of codes."""
ARCHITECTURES = ("89", "120")
CHANNELS = 128
"""Maximum channels of a result for which a thread has registers, besides the scores of a tile."""


@cache
def make_copy(rows: int, row_bytes: int) -> Any:
    """A device function ``(shared, address, stride)`` by which the block's threads start to copy ``rows`` rows.

    Args:
        rows: number of rows.
        row_bytes: bytes per row, a multiple of 16, at most 128. The rest of a line is not written.
    """
    copy_from_chunk = _make_copy(rows, row_bytes)

    @device
    def copy(shared, address, stride):
        copy_from_chunk(shared, 0, address, stride)

    return copy


@cache
def make_half_copy(rows: int) -> Any:
    """A device function ``(shared, half, address, stride)`` that starts to copy 64 bytes to one half of each line."""
    copy_from_chunk = _make_copy(rows, LINE // 2)

    @device
    def copy(shared, half, address, stride):
        copy_from_chunk(shared, half << 2, address, stride)

    return copy


@cache
def make_row_copy(rows: int, head_dim: int) -> Any:
    """A device function ``(shared, address, stride)`` that starts to copy ``rows`` rows of codes.

    With more than 128 channels, panels of 128 are stored one after another in shared memory.
    """
    if head_dim <= LINE:
        return make_copy(rows, head_dim)
    panels, copy_panel = head_dim // LINE, make_copy(rows, LINE)

    @device
    def copy(shared, address, stride):
        for panel in range(panels):
            copy_panel(shared + panel * (rows * LINE), address + panel * LINE, stride)

    return copy


def _make_copy(rows: int, row_bytes: int) -> Any:
    """A device function ``(shared, first_chunk, address, stride)``; a row is copied to its line from that chunk on."""
    chunks = row_bytes // 16
    lanes = 4
    while lanes < chunks or rows % (THREADS // lanes):  # lanes per row; rows at once are a multiple of 8
        lanes *= 2
    rows_at_once = THREADS // lanes
    shift = lanes.bit_length() - 1

    @device
    def copy(shared, first_chunk, address, stride):
        row, chunk = cuda.threadIdx.x >> shift, cuda.threadIdx.x & (lanes - 1)
        if chunk < chunks:
            shared += swizzle_128b(row, chunk + first_chunk)
            address += i64(row) * stride + 16 * chunk
            for start in range(0, rows, rows_at_once):
                cp_async_16(shared + start * LINE, address, 16)
                address += rows_at_once * stride

    return copy


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


def attention_by_mma(name: str, function: Any, parameters: Mapping[str, Any], shared_bytes: int) -> Kernel:
    """The declaration of a kernel whose warps multiply by mma."""
    return Kernel(name, function, parameters, THREADS, shared_bytes=shared_bytes, architectures=ARCHITECTURES)


@device
def scale_invs_of_block(scale_invs, block):
    """K's and V's ``scale_inv`` of a tile of keys; ``scale_invs``: their addresses, from block 0 on."""
    offset = i64(block) * 4
    return load_f32(scale_invs[0] + offset), load_f32(scale_invs[1] + offset)
