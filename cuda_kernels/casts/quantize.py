"""Casts to FP8, rowwise and transposed, from one read, with one scale per tensor, per row, or per column.

With one scale per tensor, both copies share it. Kernels use the tiles of ``tile.py``. ``out [rows, columns]`` and
``out_t [columns, rows]`` have strides that are multiples of 16 bytes; the padding is filled with zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import FP8_MAX, amax_to_scale, magnitude, update_amax
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    divide,
    dynamic_shared,
    float8x4,
    from_bits,
    load_4_if,
    load_f32,
    shuffle,
    store_f32,
)
from cuda_kernels.device.tile import (
    THREADS,
    TRANSPOSED_BYTES,
    WARP_ROWS,
    TileLoader,
    block_max,
    reduce_block_amax,
    row_of_quad,
    row_storer,
    store_transposed,
)
from cuda_kernels.kernel import Kernel, typed

_ONE, _ZERO = np.float32(1), np.float32(0)


def min_blocks_per_sm(loader: TileLoader, casts: int = 1) -> int:
    """Blocks per multiprocessor that registers allow; a second cast keeps the float32 values of the first."""
    return max(1, loader.min_blocks_per_sm - (casts - 1))


@cache
def scaled_cast(fp8: str) -> Any:
    """A device function ``(quad, scale_a, scale_b, scale_c, scale_d) -> codes``, a register with four codes."""
    pack = float8x4[fp8]

    @device
    def cast(quad, scale_a, scale_b, scale_c, scale_d):
        a, b, c, d = quad
        return pack(a * scale_a, b * scale_b, c * scale_c, d * scale_d)

    return cast


@cache
def quantize_tensor_kernel(loader: TileLoader, fp8: str, rowwise: bool, columnwise: bool, observe: bool) -> Kernel:
    """One scale per tensor: ``scale_ptr [1]`` if it is given and not 0, else from ``block_amax [num_block_amax]``.

    ``observe`` updates ``amax_out [1]`` with the tensor's amax; of two tensors, one may have none.
    """
    decode, maxima, num_registers = loader.decode, loader.maxima, loader.num_registers
    load_tile = loader.load_tile()
    store_rows = row_storer(loader.vector)
    cast, fp8_max = scaled_cast(fp8), FP8_MAX[fp8]
    n_maxima, clear, fold, amax_of = maxima.num_registers, maxima.clear, maxima.fold, maxima.largest
    (own, own_words), tensors = loader.own, loader.tensors
    of_experts = loader.addresses > tensors

    def quantize_tensor(
        loader_args, scale_ptr, block_amax, amax_out, out, out_scale_inv, out_t,
        rows, columns, num_block_amax, power_2, epsilon, out_stride, out_t_stride,
    ):  # fmt: skip
        scale_ptr, block_amax, amax_out = own(scale_ptr), own_words(block_amax, num_block_amax), own(amax_out)
        out, out_scale_inv, out_t = own(out), own(out_scale_inv), own(out_t)
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        registers = cuda.local.array(num_registers, u32)
        tile_row, tile_col, first_row, column, full_tile = load_tile(
            loader_args, cuda.blockIdx.x, rows, columns, registers
        )

        scale = _ZERO
        if scale_ptr != 0:
            scale = load_f32(scale_ptr)
        if scale == _ZERO:
            amax = from_bits(reduce_block_amax(block_amax, num_block_amax, smem + TRANSPOSED_BYTES, thread))
            scale = amax_to_scale(amax, fp8_max, power_2, epsilon)
        if (cuda.blockIdx.x >> (tensors - 1)) == 0 and thread == 0 and (not of_experts or cuda.blockIdx.z == 0):
            store_f32(out_scale_inv, divide(_ONE, scale))

        packed, running_max = cuda.local.array(WARP_ROWS, u32), cuda.local.array(n_maxima, u32)
        clear(running_max)
        for quad_index in range(WARP_ROWS):
            quad = decode(registers, quad_index)
            packed[quad_index] = cast(quad, scale, scale, scale, scale)
            if observe:
                fold(registers, quad_index, quad, running_max)
        if rowwise:
            store_rows(packed, out, out_stride, first_row, rows, column, full_tile)
        if observe:
            amax_bits = block_max(amax_of(running_max), smem + TRANSPOSED_BYTES + 32, thread)
            if thread == 0 and (tensors == 1 or amax_out != 0):
                update_amax(amax_out, amax_bits)
        if columnwise:
            store_transposed(packed, smem, thread, out_t, out_t_stride, tile_row, tile_col, columns)

    name = f"quantize_tensor({loader.name}, {fp8}, {rowwise=}, {columnwise=}, {observe=})"
    parameters = {
        "loader_args": loader.args_type,
        "scale_ptr": loader.address_type,
        "block_amax": i64,
        "amax_out": loader.address_type,
        **typed(loader.address_type, "out out_scale_inv out_t"),
        **typed(i32, "rows columns num_block_amax power_2"),
        "epsilon": f32,
        **typed(i64, "out_stride out_t_stride"),
    }
    shared_bytes, blocks = TRANSPOSED_BYTES + 64, min_blocks_per_sm(loader)
    return Kernel(name, quantize_tensor, parameters, THREADS, shared_bytes=shared_bytes, min_blocks_per_sm=blocks)


@cache
def quantize_rows_kernel(loader: TileLoader, fp8: str, rowwise: bool, columnwise: bool) -> Kernel:
    """One scale per row, and for the transposed copy one per column, from ``amaxes [rows + columns]``."""
    decode, num_registers = loader.decode, loader.num_registers
    load_tile = loader.load_tile()
    row_of = row_of_quad(loader.vector)
    store_rows = row_storer(loader.vector)
    cast, fp8_max = scaled_cast(fp8), FP8_MAX[fp8]
    quads_of_row = loader.vector // 4
    own, own_words = loader.own

    def quantize_rows(
        loader_args, amaxes, out, out_scale_inv, out_t, out_t_scale_inv,
        rows, columns, power_2, epsilon, out_stride, out_scale_inv_stride, out_t_stride, out_t_scale_inv_stride,
    ):  # fmt: skip
        amaxes, out, out_scale_inv = own_words(amaxes, rows + columns), own(out), own(out_scale_inv)
        out_t, out_t_scale_inv = own(out_t), own(out_t_scale_inv)
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        registers = cuda.local.array(num_registers, u32)
        tile_row, tile_col, first_row, column, full_tile = load_tile(
            loader_args, cuda.blockIdx.x, rows, columns, registers
        )
        packed = cuda.local.array(WARP_ROWS, u32)
        if rowwise:
            row_scale, scale = _ONE, _ONE  # of row `lane` of the warp's 16
            row_of_lane = i32(tile_row + WARP_ROWS * warp + lane)
            if lane < WARP_ROWS and row_of_lane < rows:
                row_scale = amax_to_scale(load_f32(amaxes + i64(row_of_lane) * 4), fp8_max, power_2, epsilon)
                if tile_col == 0:
                    store_f32(out_scale_inv + i64(row_of_lane) * 4, divide(_ONE, row_scale))
            for quad_index in range(WARP_ROWS):
                quad = decode(registers, quad_index)
                if quad_index & (quads_of_row - 1) == 0:
                    scale = from_bits(shuffle(magnitude(row_scale), row_of(lane, quad_index)))
                packed[quad_index] = cast(quad, scale, scale, scale, scale)
            store_rows(packed, out, out_stride, first_row, rows, column, full_tile)
        if columnwise:
            scales = cuda.local.array(4, f32)
            for index in range(4):
                scales[index] = _ONE
                if column + index < columns:
                    amax = load_f32(amaxes + (i64(rows) + column + index) * 4)
                    scales[index] = amax_to_scale(amax, fp8_max, power_2, epsilon)
                    if tile_row == 0 and warp == 0:
                        store_f32(out_t_scale_inv + i64(column + index) * 4, divide(_ONE, scales[index]))
            for quad_index in range(WARP_ROWS):
                quad = decode(registers, quad_index)
                packed[quad_index] = cast(quad, scales[0], scales[1], scales[2], scales[3])
            store_transposed(packed, dynamic_shared(), thread, out_t, out_t_stride, tile_row, tile_col, columns)

    name = f"quantize_rows({loader.name}, {fp8}, {rowwise=}, {columnwise=})"
    parameters = {
        "loader_args": loader.args_type,
        "amaxes": i64,
        **typed(loader.address_type, "out out_scale_inv out_t out_t_scale_inv"),
        **typed(i32, "rows columns power_2"),
        "epsilon": f32,
        **typed(i64, "out_stride out_scale_inv_stride out_t_stride out_t_scale_inv_stride"),
    }
    blocks = min_blocks_per_sm(loader, rowwise + columnwise)
    return Kernel(name, quantize_rows, parameters, THREADS, shared_bytes=TRANSPOSED_BYTES, min_blocks_per_sm=blocks)


@cache
def quantize_columns_kernel(loader: TileLoader, fp8: str) -> Kernel:
    """A rowwise copy with a given scale per column, ``scale [columns]``."""
    decode, num_registers, vector = loader.decode, loader.num_registers, loader.vector
    load_tile = loader.load_tile()
    store_rows = row_storer(vector)
    cast = float8x4[fp8]
    quads_of_row = vector // 4

    def quantize_columns(loader_args, scale, out, rows, columns, out_stride):
        registers = cuda.local.array(num_registers, u32)
        _, _, first_row, column, full_tile = load_tile(loader_args, cuda.blockIdx.x, rows, columns, registers)
        scales = cuda.local.array(vector, f32)
        address = scale + i64(column) * 4
        for index in range(vector):
            scales[index] = from_bits(load_4_if(address + 4 * index, column + index < columns))
        packed = cuda.local.array(WARP_ROWS, u32)
        for quad_index in range(WARP_ROWS):
            a, b, c, d = decode(registers, quad_index)
            first = 4 * (quad_index & (quads_of_row - 1))
            packed[quad_index] = cast(
                a * scales[first], b * scales[first + 1], c * scales[first + 2], d * scales[first + 3]
            )
        store_rows(packed, out, out_stride, first_row, rows, column, full_tile)

    parameters = {
        "loader_args": loader.args_type,
        **typed(i64, "scale out"),
        **typed(i32, "rows columns"),
        "out_stride": i64,
    }
    name = f"quantize_columns({loader.name}, {fp8})"
    return Kernel(name, quantize_columns, parameters, THREADS, min_blocks_per_sm=loader.min_blocks_per_sm)
