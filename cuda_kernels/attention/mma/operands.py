"""Operands of a warp's products, copied with cp.async to shared memory, and the declaration of such kernels.

Shared memory has lines of 128 bytes, swizzled (:func:`~cuda_kernels.device.swizzle.swizzle_128b`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cuda_kernels.attention.spec import ROWS
from cuda_kernels.device.language import cuda, device, i64
from cuda_kernels.device.ptx import cp_async_16, load_f32
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


def attention_by_mma(name: str, function: Any, parameters: Mapping[str, Any], shared_bytes: int) -> Kernel:
    """The declaration of a kernel whose warps multiply by mma."""
    return Kernel(name, function, parameters, THREADS, shared_bytes=shared_bytes, architectures=ARCHITECTURES)


@device
def scale_invs_of_block(scale_invs, block):
    """K's and V's ``scale_inv`` of a tile of keys; ``scale_invs``: their addresses, from block 0 on."""
    offset = i64(block) * 4
    return load_f32(scale_invs[0] + offset), load_f32(scale_invs[1] + offset)
