"""Transpose FP8 codes, by the tiles of ``tile.py`` and through shared memory, as casts store their transposed copy."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import dynamic_shared, load_1_if, load_4_if
from cuda_kernels.device.tile import (
    THREADS,
    TRANSPOSED_BYTES,
    WARP_ROWS,
    position,
    store_transposed,
    thread_origin,
)
from cuda_kernels.kernel import Kernel, typed


def _quad_loader(vector: int) -> Any:
    """A device function ``(address, column, columns, in_bounds) -> register`` that loads four codes of a row.

    Codes beyond ``columns`` are zeros; if ``in_bounds`` is false, all four are. With a ``vector`` of 4, address and
    columns are multiples of 4.
    """

    @device
    def load_quad(address, column, columns, in_bounds):
        return load_4_if(address, in_bounds and column < columns)

    @device
    def load_each(address, column, columns, in_bounds):
        codes = u32(0)
        for index in range(4):
            code = load_1_if(address + index, in_bounds and column + index < columns)
            codes |= code << u32(8 * index)
        return codes

    return load_quad if vector == 4 else load_each


@cache
def transpose_kernel(vector: int, of_experts: bool = False) -> Kernel:
    """``codes [rows, columns]``, a byte each, to ``out [columns, rows]``; one tile per block, of the expert of its z.

    A warp reads 128 bytes of a row at once, and writes 128 bytes of each of four columns. ``out_stride`` is a multiple
    of 16; the padding is filled with zeros. ``vector``: address, ``stride`` and columns are multiples of 4 or 1 bytes.
    """
    load_quad = _quad_loader(vector)
    origin_of = thread_origin(4)

    def transpose(codes, stride, out, rows, columns, out_stride):
        thread = cuda.threadIdx.x
        if of_experts:
            codes += i64(cuda.blockIdx.z) * (i64(rows) * stride)
            out += i64(cuda.blockIdx.z) * (i64(columns) * out_stride)
        tile_row, tile_col, full_tile = position(cuda.blockIdx.x, rows, columns)
        row_in_tile, col_in_tile = origin_of(thread)
        first_row, column = i32(tile_row + row_in_tile), i32(tile_col + col_in_tile)
        quads = cuda.local.array(WARP_ROWS, u32)
        address = codes + i64(first_row) * stride + i64(column)
        if full_tile and vector > 1:
            for step in range(WARP_ROWS):
                quads[step] = load_4_if(address, True)
                address += stride
        else:
            rows_left = i32(rows - first_row)
            for step in range(WARP_ROWS):
                quads[step] = load_quad(address, column, columns, i32(step) < rows_left)
                address += stride
        store_transposed(quads, dynamic_shared(), thread, out, out_stride, tile_row, tile_col, columns)

    parameters = {**typed(i64, "codes stride out"), **typed(i32, "rows columns"), "out_stride": i64}
    return Kernel(
        f"transpose({vector=}{', experts' * of_experts})",
        transpose,
        parameters,
        THREADS,
        shared_bytes=TRANSPOSED_BYTES,
        min_blocks_per_sm=4 if vector > 1 else 2,
    )
