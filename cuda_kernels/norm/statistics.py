"""LayerNorm and RMSNorm: statistics of rows, and the normalized tensor as a tile loader.

``y = (x - mean) * rstd * (weight + offset) + bias`` with ``rstd = 1 / sqrt(var + eps)``, in float32 (Ba et al.,
arXiv:1607.06450). RMSNorm has no mean and no bias, and uses the mean of x² as variance (Zhang and Sennrich,
arXiv:1910.07467). ``offset`` is 1 for a weight that is stored zero-centered. The variance is computed from differences
to the mean, in a second pass over registers or cached rows, because E[x²] - E[x]² would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import decoded_maxima, quad_decoder, quad_loader, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import bits, divide, dynamic_shared, from_bits, load_f32, shuffle, square_root, store_f32
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.tile import WARP_ROWS, TileLoader, tensor_loader
from cuda_kernels.kernel import Kernel, typed
from cuda_kernels.norm.rows import (
    THREADS,
    RowLayout,
    inside_row,
    quad_column,
    quad_reader,
    row_loader,
    row_registers,
    row_sum,
)

_ONE, _ZERO = np.float32(1), np.float32(0)


@dataclass(frozen=True)
class NormSpec:
    """The options of a normalization's kernels.

    Attributes:
        dtype: dtype of x.
        weight_dtype: dtype of weight and bias.
        has_mean: whether the mean is subtracted (LayerNorm).
        has_bias: whether a bias is added.
    """

    dtype: DtypeName
    weight_dtype: DtypeName
    has_mean: bool
    has_bias: bool

    def __str__(self) -> str:
        return f"{self.dtype}, {self.weight_dtype}, mean={self.has_mean}, bias={self.has_bias}"


def normalizer(spec: NormSpec) -> Any:
    """A device function ``(x, mean, rstd, weight, bias) -> y``."""
    subtract, add = spec.has_mean, spec.has_bias

    @device
    def normalize(x, mean, rstd, weight, bias):
        x = x - mean if subtract else x
        x = x * rstd * weight
        return x + bias if add else x

    return normalize


@cache
def normalized_loader(spec: NormSpec, aligned: bool) -> TileLoader:
    """Loads the normalized tensor; elements outside it are zeros.

    Arguments: x's address, the stride of its rows in elements, the addresses of weight, bias and statistics, offset.
    ``aligned``: addresses, stride and columns are multiples of four elements. All lanes of a warp must decode together,
    because each holds the statistics of one row.
    """
    x_loader = tensor_loader(spec.dtype, 4 if aligned else 1)
    normalize = normalizer(spec)
    rstd_pointer = rstd_address(spec.has_mean)
    load_x, decode_x = x_loader.load, x_loader.decode
    parameters = quad_reader(spec.weight_dtype, aligned)
    has_mean, has_bias = spec.has_mean, spec.has_bias
    weight_registers = x_loader.num_registers
    bias_registers = weight_registers + 4
    mean_register = bias_registers + (4 if has_bias else 0)
    rstd_register = mean_register + (1 if has_mean else 0)
    limit_registers = rstd_register + 1
    n_limits = 1 if aligned else 4
    num_registers = limit_registers + n_limits

    @device
    def load_parameters(address, column, columns, offset, registers, start):
        a, b, c, d = parameters(address, column, columns)
        registers[start], registers[start + 1] = bits(a + offset), bits(b + offset)
        registers[start + 2], registers[start + 3] = bits(c + offset), bits(d + offset)

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        load_x(args, rows, columns, first_row, column, full_tile, registers)
        _, _, weight, bias, statistics, offset = args
        lane = cuda.threadIdx.x & 31
        lane_offset = i64(first_row + lane) * 4
        in_bounds = lane < WARP_ROWS and first_row + lane < rows
        if has_mean:
            registers[mean_register] = bits(load_f32(statistics + lane_offset)) if in_bounds else u32(0)
        rstd = rstd_pointer(statistics, rows)
        registers[rstd_register] = bits(load_f32(rstd + lane_offset)) if in_bounds else u32(0)
        load_parameters(weight, column, columns, f32(offset), registers, weight_registers)
        if has_bias:
            load_parameters(bias, column, columns, _ZERO, registers, bias_registers)
        # A column's limit is the number of rows from this one on that are inside the tensor.
        below = rows - first_row if first_row < rows else 0
        for index in range(n_limits):
            registers[limit_registers + index] = u32(below) if column + index < columns else u32(0)

    @device
    def element(registers, quad_index, index, x, mean_of_row, rstd_of_row):
        shift = from_bits(registers[bias_registers + index]) if has_bias else _ZERO
        y = normalize(x, mean_of_row, rstd_of_row, from_bits(registers[weight_registers + index]), shift)
        return y if u32(quad_index) < registers[limit_registers + (0 if aligned else index)] else _ZERO

    @device
    def decode(registers, quad_index):
        a, b, c, d = decode_x(registers, quad_index)
        m = from_bits(shuffle(registers[mean_register], quad_index)) if has_mean else _ZERO
        r = from_bits(shuffle(registers[rstd_register], quad_index))
        return (
            element(registers, quad_index, 0, a, m, r),
            element(registers, quad_index, 1, b, m, r),
            element(registers, quad_index, 2, c, m, r),
            element(registers, quad_index, 3, d, m, r),
        )

    min_blocks_per_sm = 2 if spec.dtype == "float32" else 3
    return TileLoader(f"norm({spec}, {aligned=})", 6, num_registers, load, decode, decoded_maxima(), min_blocks_per_sm)


def rstd_address(has_mean: bool) -> Any:
    """A device function ``(statistics, rows) -> address`` of the rows' rstds, which are stored after any means."""

    @device
    def rstd_of_rows(statistics, rows):
        return statistics + i64(rows) * 4 if has_mean else statistics

    return rstd_of_rows


@device
def _rstd(squares, columns, eps):
    return divide(_ONE, square_root(divide(squares, f32(columns)) + eps))


def row_statistics(dtype: DtypeName, has_mean: bool, row_layout: RowLayout) -> Any:
    """A device function ``(registers, columns, thread_in_row, eps, shared, thread) -> mean, rstd`` of a row.

    ``registers``: this thread's share of the row. ``shared``: two times 32 bytes.
    """
    registers_of_quad, decode = quad_registers(dtype), quad_decoder(dtype)
    quads, column_of, in_bounds = row_layout.quads_per_thread, quad_column(row_layout), inside_row(row_layout)
    total = row_sum(row_layout.threads_per_row)

    @device
    def statistics(registers, columns, thread_in_row, eps, shared, thread):
        m, squares = _ZERO, _ZERO
        if has_mean:
            for quad in range(quads):
                a, b, c, d = decode(registers, quad * registers_of_quad)
                m += (a + b) + (c + d)
            m = divide(total(m, shared, thread), f32(columns))
        for quad in range(quads):
            a, b, c, d = decode(registers, quad * registers_of_quad)
            a, b, c, d = a - m, b - m, c - m, d - m
            squares += (
                (a * a + b * b) + (c * c + d * d) if in_bounds(column_of(quad, thread_in_row), columns) else _ZERO
            )
        return m, _rstd(total(squares, shared + 32, thread), columns, eps)

    return statistics


def long_row_statistics(dtype: DtypeName, has_mean: bool, aligned: bool, threads: int) -> Any:
    """A device function ``(row_address, columns, in_bounds, thread_in_row, eps, shared, thread) -> mean, rstd``.

    Rows in memory may have any length and alignment. A row is read by ``threads`` threads, twice if there is a mean; if
    it is not ``in_bounds``, nothing is read. ``shared``: two times 32 bytes, if ``threads`` exceeds a warp.
    """
    load, decode = quad_loader(dtype, aligned), quad_decoder(dtype)
    registers_of_quad, itemsize = quad_registers(dtype), ITEM_BYTES[dtype]
    total = row_sum(threads)
    stride = 4 * threads
    num_registers = _AT_ONCE * registers_of_quad
    columns_at_once = _AT_ONCE * stride

    @device
    def load_some(row_address, column, columns, in_bounds, registers):
        for index in range(_AT_ONCE):
            col = column + index * stride
            loaded = load(row_address + i64(col) * itemsize, col, columns, in_bounds)
            for register in range(registers_of_quad):
                registers[index * registers_of_quad + register] = loaded[register]

    @device
    def statistics(row_address, columns, in_bounds, thread_in_row, eps, shared, thread):
        registers = cuda.local.array(num_registers, u32)
        m, squares, start = _ZERO, _ZERO, i32(0)
        while has_mean and start < columns:
            load_some(row_address, start + 4 * thread_in_row, columns, in_bounds, registers)
            for index in range(_AT_ONCE):
                a, b, c, d = decode(registers, index * registers_of_quad)
                m += (a + b) + (c + d)
            start += i32(columns_at_once)
        if has_mean:
            m = divide(total(m, shared, thread), f32(columns))
        start = i32(0)
        while start < columns:
            load_some(row_address, start + 4 * thread_in_row, columns, in_bounds, registers)
            for index in range(_AT_ONCE):
                column = start + 4 * thread_in_row + index * stride
                a, b, c, d = decode(registers, index * registers_of_quad)
                a, b, c, d = a - m, b - m, c - m, d - m
                squares += a * a if column < columns else _ZERO
                squares += b * b if column + 1 < columns else _ZERO
                squares += c * c if column + 2 < columns else _ZERO
                squares += d * d if column + 3 < columns else _ZERO
            start += i32(columns_at_once)
        return m, _rstd(total(squares, shared + 32, thread), columns, eps)

    return statistics


_AT_ONCE = 8
"""Number of a thread's loads that overlap."""

_PARAMETERS = typed(i64, "x stride statistics") | typed(i32, "rows columns") | typed(f32, "eps")
"""``stride``: between rows of x, in elements."""


@cache
def statistics_of_rows_kernel(dtype: DtypeName, has_mean: bool, row_layout: RowLayout) -> Kernel:
    """``statistics``, float32 ``[2, rows]``: mean and rstd, or ``[1, rows]`` with only rstd, for rows in registers."""
    load_row = row_loader(dtype, row_layout)
    statistics_of_row = row_statistics(dtype, has_mean, row_layout)
    registers_of_row = row_registers(dtype, row_layout)
    itemsize = ITEM_BYTES[dtype]
    row_thread_mask, shift, rows_of_block = row_layout.in_block
    rstd_pointer = rstd_address(has_mean)

    def statistics_of_rows(x, stride, statistics, rows, columns, eps):
        thread = cuda.threadIdx.x
        thread_in_row = thread & row_thread_mask
        row = cuda.blockIdx.x * rows_of_block + (thread >> shift)
        registers = cuda.local.array(registers_of_row, u32)
        # A thread without a row reads the last row again.
        load_row(x + i64(row if row < rows else rows - 1) * stride * itemsize, columns, thread_in_row, registers)
        m, r = statistics_of_row(registers, columns, thread_in_row, eps, dynamic_shared(), thread)
        if thread_in_row == 0 and row < rows:
            if has_mean:
                store_f32(statistics + i64(row) * 4, m)
            store_f32(rstd_pointer(statistics, rows) + i64(row) * 4, r)

    return Kernel(
        f"statistics({dtype}, mean={has_mean}, {row_layout})",
        statistics_of_rows,
        _PARAMETERS,
        THREADS,
        shared_bytes=64,
        min_blocks_per_sm=2 if registers_of_row > 32 else 4,
    )


@cache
def statistics_of_long_rows_kernel(dtype: DtypeName, has_mean: bool, aligned: bool) -> Kernel:
    """The same for rows of any length and alignment, one per block; each is read again for the variance."""
    statistics_of_row = long_row_statistics(dtype, has_mean, aligned, THREADS)
    itemsize = ITEM_BYTES[dtype]
    rstd_pointer = rstd_address(has_mean)

    def statistics_of_long_rows(x, stride, statistics, rows, columns, eps):
        thread = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x)
        m, r = statistics_of_row(x + row * stride * itemsize, columns, True, thread, eps, dynamic_shared(), thread)
        if thread == 0:
            if has_mean:
                store_f32(statistics + row * 4, m)
            store_f32(rstd_pointer(statistics, rows) + row * 4, r)

    return Kernel(
        f"long_statistics({dtype}, mean={has_mean}, {aligned=})",
        statistics_of_long_rows,
        _PARAMETERS,
        THREADS,
        shared_bytes=64,
        min_blocks_per_sm=4,
    )
