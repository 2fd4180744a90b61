"""Store a warp's rows of a result from registers to global memory, for any number of rows and any strides."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.spec import TILE_OUT_ROW, TILE_OUT_ROWS, TILE_SEQUENCE, TILE_VALID
from cuda_kernels.device.fragments import scale_seen_rows, slice_fragment
from cuda_kernels.device.language import cuda, device, i64
from cuda_kernels.device.ptx import shared_load_16, store_16
from cuda_kernels.device.sizes import DtypeName
from cuda_kernels.device.sm90 import syncwarp
from cuda_kernels.device.swizzle import ROW_BYTES, make_swizzled_store, swizzle_128b

WARP_BYTES = 16 * ROW_BYTES
"""Shared memory of a warp: 128 bytes for each of its 16 rows."""


@cache
def make_result_store(channels: int, dtype: DtypeName, first_channel: int = 0, again: bool = False) -> Any:
    """A device function that stores ``channels`` channels of a tile's result, from ``first_channel`` on, in ``dtype``.

    It is ``(acc, s, t, i, j, shared, out, tile, head, warp, strides)``: a warpgroup's accumulator, scaled and cleared
    by ``scale_seen_rows``; :data:`WARP_BYTES` per warp, as for :func:`make_row_store`; the address of the result; and
    its strides in elements, between sequences, rows and heads. ``again``: see :func:`make_row_store`.
    """
    item = 4 if dtype == "float32" else 2
    finish, store_rows = scale_seen_rows(channels // 2), make_row_store(channels, dtype, again)

    @device
    def store(acc, s, t, i, j, shared, out, tile, head, warp, strides):
        sequence, out_row, out_rows = tile[TILE_SEQUENCE], tile[TILE_OUT_ROW], tile[TILE_OUT_ROWS]
        stride_b, stride_l, stride_h = strides
        warp_row = warp * 16
        place = i64(sequence) * stride_b + i64(out_row + warp_row) * stride_l + i64(head) * stride_h + first_channel
        rows_left, lane = out_rows - warp_row, cuda.threadIdx.x & 31
        store_rows(
            finish(acc, s, t, i, j), shared + warp * WARP_BYTES, out + place * item, stride_l * item, rows_left, lane
        )

    return store


@cache
def make_gradient_store(channels: int, dtype: DtypeName, first_channel: int = 0, again: bool = False) -> Any:
    """:func:`make_result_store` with one factor for all rows, and zeros in rows beyond the sequence.

    It is ``(acc, factor, shared, out, tile, head, warp, strides)``.
    """
    store_result = make_result_store(channels, dtype, first_channel, again)

    @device
    def store(acc, factor, shared, out, tile, head, warp, strides):
        row_in_tile, valid = warp * 16 + (cuda.threadIdx.x >> 2 & 7), tile[TILE_VALID]
        store_result(
            acc, factor, factor, row_in_tile < valid, row_in_tile + 8 < valid, shared, out, tile, head, warp, strides
        )

    return store


@cache
def make_row_store(channels: int, dtype: DtypeName, again: bool, start: int = 0) -> Any:
    """A device function ``(acc, shared, out, stride, rows_left, lane)`` that stores a warp's 16 rows of ``channels``.

    ``acc``: the warp's part of a warpgroup's accumulator. ``shared``: :data:`WARP_BYTES` for this warp, aligned to the
    swizzle's ``ATOM_BYTES``. ``out``: the address of the first row; ``stride``: bytes between rows; both are multiples
    of 16. ``rows_left``: the number of rows to store. ``again``: whether the warp may still be reading an earlier
    result from ``shared``. ``start``: the first channel; 128 bytes of each row are stored at a time.
    """
    item = 4 if dtype == "float32" else 2
    columns = min(ROW_BYTES // item, channels - start)
    chunks = columns * item // 16
    part = slice_fragment(channels // 2, start // 2, columns // 2)
    to_shared = make_swizzled_store(columns // 2, dtype)
    byte = start * item
    is_last = start + columns == channels
    store_rest = None if is_last else make_row_store(channels, dtype, True, start + columns)

    @device
    def store(acc, shared, out, stride, rows_left, lane):
        if again:
            syncwarp()
        to_shared(part(acc), shared, lane)
        syncwarp()
        chunk = lane & 7
        for index in range(4):
            line = 4 * index + (lane >> 3)
            words = shared_load_16(shared + swizzle_128b(line, chunk))
            if line < rows_left and chunk < chunks:
                store_16(out + i64(line) * stride + byte + 16 * chunk, words[0], words[1], words[2], words[3])

    if is_last:
        return store

    @device
    def store_all(acc, shared, out, stride, rows_left, lane):
        store(acc, shared, out, stride, rows_left, lane)
        store_rest(acc, shared, out, stride, rows_left, lane)

    return store_all
