"""The gradients of LayerNorm and RMSNorm.

With ``x^ = (x - mean) rstd`` and ``g = dy (weight + offset)``: ``dx = rstd (g - mean(g) - x^ mean(g x^))``,
``dweight = sum(dy x^)`` and ``dbias = sum(dy)`` over rows; without a mean, ``mean(g)`` is dropped (Ba et al.,
arXiv:1607.06450, differentiated; Zhang and Sennrich, arXiv:1910.07467, section 4). Block b of n processes rows b, b +
n, b + 2n, ... in order, and stores partial sums over them, float32 ``[n, stride]``, for dweight and then for dbias. The
kernel of ``cuda_kernels/casts/column_sums.py`` adds them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import quad_decoder, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import bits, divide, dynamic_shared, load_f32, store_16, store_f32
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.kernel import Kernel, typed
from cuda_kernels.norm.rows import (
    THREADS,
    RowLayout,
    inside_row,
    narrowest_row_layout,
    parameter_quad,
    quad_address,
    quad_column,
    quad_reader,
    quad_storer,
    row_loader,
    row_registers,
    row_sum,
)
from cuda_kernels.norm.statistics import NormSpec, rstd_address

_ZERO = np.float32(0)


def backward_row_layout(dtypes: tuple[DtypeName, ...], columns: int, has_mean: bool = False) -> RowLayout | None:
    """The layout of rows, one per block; a thread holds 16 or 8 elements each of x, dy and the sums over rows.

    Before a row takes 1024 threads, 512 hold half as many again; not with a mean, whose sums take more registers.
    """
    elements = 16 if all(ITEM_BYTES[dtype] == 2 for dtype in dtypes) else 8
    most = elements if has_mean else elements * 3 // 2
    layout = narrowest_row_layout(dtypes, columns, (32, 64, 128, 256, 512), elements, most)
    return layout or narrowest_row_layout(dtypes, columns, (1024,), elements, elements)


_PARAMETERS = {
    **typed(i64, "x stride dy dy_stride weight statistics dx partials partial_stride"),
    **typed(i32, "rows columns"),
    "offset": f32,
}
"""Strides are in elements; ``stride`` is that of x."""


def _normalizer(spec: NormSpec) -> Any:
    """A device function ``(x, mean, rstd) -> x^`` of four elements."""
    has_mean = spec.has_mean

    @device
    def normalize(x, mean, rstd):
        a, b, c, d = x
        if has_mean:
            a, b, c, d = a - mean, b - mean, c - mean, d - mean
        return a * rstd, b * rstd, c * rstd, d * rstd

    return normalize


@device
def _weighted(dy, weight, offset):
    """``g`` of four elements."""
    a, b, c, d = dy
    w0, w1, w2, w3 = weight
    return a * (w0 + offset), b * (w1 + offset), c * (w2 + offset), d * (w3 + offset)


@device
def _sum(a, b, c, d):
    return (a + b) + (c + d)


@device
def _dot(x, y):
    return _sum(x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3])


def _gradient_storer(spec: NormSpec, aligned: bool, full: bool) -> Any:
    """A device function that stores four elements of dx at an address, from ``column`` on.

    ``full``: no column is outside the row.
    """
    has_mean = spec.has_mean
    store = quad_storer(spec.dtype, aligned)

    @device
    def gradient(g, normalized, mean_of_g, mean_of_product, rstd):
        g = g - mean_of_g if has_mean else g
        return rstd * (g - normalized * mean_of_product)

    @device
    def store_gradient(address, column, columns, g, normalized, mean_of_g, mean_of_product, rstd):
        store(
            address,
            0 if full else column,
            1 if full else columns,
            gradient(g[0], normalized[0], mean_of_g, mean_of_product, rstd),
            gradient(g[1], normalized[1], mean_of_g, mean_of_product, rstd),
            gradient(g[2], normalized[2], mean_of_g, mean_of_product, rstd),
            gradient(g[3], normalized[3], mean_of_g, mean_of_product, rstd),
        )

    return store_gradient


@cache
def norm_backward_kernel(spec: NormSpec, dy_dtype: DtypeName, row_layout: RowLayout) -> Kernel:
    """Rows in registers, one per block at a time: one read computes dx ``[rows, columns]`` and partial sums.

    dx is contiguous. The next row is loaded while warps exchange the sums of the current one. For this, g and x^ are
    kept as float32; blocks of 1024 threads, with 64 registers each, compute them twice instead.
    """
    threads = row_layout.threads_per_row
    quads = row_layout.quads_per_thread
    column_of = quad_column(row_layout)
    load_x, load_dy = row_loader(spec.dtype, row_layout), row_loader(dy_dtype, row_layout)
    decode_x, decode_dy = quad_decoder(spec.dtype), quad_decoder(dy_dtype)
    weights = parameter_quad(spec.weight_dtype)
    num_x_registers, num_dy_registers = row_registers(spec.dtype, row_layout), row_registers(dy_dtype, row_layout)
    x_registers, dy_registers = quad_registers(spec.dtype), quad_registers(dy_dtype)
    itemsize, dy_itemsize = ITEM_BYTES[spec.dtype], ITEM_BYTES[dy_dtype]
    weight_address = quad_address(ITEM_BYTES[spec.weight_dtype], row_layout)
    dx_address_of = quad_address(itemsize, row_layout)
    has_mean, has_bias = spec.has_mean, spec.has_bias
    elements = 4 * quads
    rstd_pointer = rstd_address(spec.has_mean)
    normalize = _normalizer(spec)
    store = _gradient_storer(spec, True, row_layout.full)
    total = row_sum(threads)
    sum_bytes = 4 * (threads >> 5)  # bytes of shared memory for one sum
    buffer_bytes = 2 * sum_bytes
    in_bounds = inside_row(row_layout)
    prefetches = threads < 1024

    @device
    def load(x, stride, dy, dy_stride, statistics, row, rows, columns, thread, xs, dys):
        """Load x and dy of a row into registers, and return its mean and rstd."""
        load_x(x + row * stride * itemsize, columns, thread, xs)
        load_dy(dy + row * dy_stride * dy_itemsize, columns, thread, dys)
        return load_f32(statistics + row * 4) if has_mean else _ZERO, load_f32(rstd_pointer(statistics, rows) + row * 4)

    @device
    def decode_and_normalize(xs, dys, quad, thread, columns, weight, offset, mean, rstd):
        column = column_of(quad, thread)
        d = decode_dy(dys, quad * dy_registers)
        w = weights(weight_address(weight, quad, thread), in_bounds(column, columns))
        return normalize(decode_x(xs, quad * x_registers), mean, rstd), d, _weighted(d, w, offset)

    def norm_backward(
        x, stride, dy, dy_stride, weight, statistics, dx, partials, partial_stride, rows, columns, offset
    ):
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        sum_buffer = i32(0)
        weight_sums, bias_sums = cuda.local.array(elements, f32), cuda.local.array(elements, f32)
        xs, dys = cuda.local.array(num_x_registers, u32), cuda.local.array(num_dy_registers, u32)
        normalized_row, g_row = cuda.local.array(elements, f32), cuda.local.array(elements, f32)
        for index in range(elements):
            weight_sums[index], bias_sums[index] = _ZERO, _ZERO
        row, mean, rstd = i64(cuda.blockIdx.x), _ZERO, _ZERO
        if prefetches and row < rows:
            mean, rstd = load(x, stride, dy, dy_stride, statistics, row, rows, columns, thread, xs, dys)
        while row < rows:
            if not prefetches:
                mean, rstd = load(x, stride, dy, dy_stride, statistics, row, rows, columns, thread, xs, dys)
            g_mean = _ZERO
            product_mean = _ZERO
            row_rstd = rstd
            for quad in range(quads):
                normalized, d, g = decode_and_normalize(xs, dys, quad, thread, columns, weight, offset, mean, rstd)
                g_mean += _sum(g[0], g[1], g[2], g[3])
                product_mean += _dot(g, normalized)
                for index in range(4):
                    weight_sums[4 * quad + index] += d[index] * normalized[index]
                    bias_sums[4 * quad + index] += d[index]
                    normalized_row[4 * quad + index], g_row[4 * quad + index] = normalized[index], g[index]
            next_row = row + i64(cuda.gridDim.x)
            if prefetches and next_row < rows:
                mean, rstd = load(x, stride, dy, dy_stride, statistics, next_row, rows, columns, thread, xs, dys)
            if has_mean:
                g_mean = divide(total(g_mean, smem + sum_buffer, thread), f32(columns))
            product_mean = divide(total(product_mean, smem + sum_buffer + sum_bytes, thread), f32(columns))
            sum_buffer ^= i32(buffer_bytes)  # a warp may write sums of the next row while another reads these
            for quad in range(quads):
                p = 4 * quad
                normalized = normalized_row[p], normalized_row[p + 1], normalized_row[p + 2], normalized_row[p + 3]
                g = g_row[p], g_row[p + 1], g_row[p + 2], g_row[p + 3]
                if not prefetches:
                    normalized, _, g = decode_and_normalize(xs, dys, quad, thread, columns, weight, offset, mean, rstd)
                dx_address = dx_address_of(dx + row * columns * itemsize, quad, thread)
                store(dx_address, column_of(quad, thread), columns, g, normalized, g_mean, product_mean, row_rstd)
            row = next_row
        weight_partials = partials + i64(cuda.blockIdx.x) * partial_stride * 4
        bias_partials = weight_partials + i64(cuda.gridDim.x) * partial_stride * 4
        for quad in range(quads):
            p = 4 * quad
            column = column_of(quad, thread)
            byte_offset = i64(column) * 4
            if in_bounds(column, columns):
                store_16(
                    weight_partials + byte_offset,
                    bits(weight_sums[p]), bits(weight_sums[p + 1]), bits(weight_sums[p + 2]), bits(weight_sums[p + 3]),
                )  # fmt: skip
                if has_bias:
                    store_16(
                        bias_partials + byte_offset,
                        bits(bias_sums[p]), bits(bias_sums[p + 1]), bits(bias_sums[p + 2]), bits(bias_sums[p + 3]),
                    )  # fmt: skip

    return Kernel(
        f"norm_backward({spec}, {dy_dtype}, {row_layout})",
        norm_backward,
        _PARAMETERS,
        threads,
        shared_bytes=2 * buffer_bytes,
        # A thread has 128 of 65,536 registers; 512 threads with a row each keep 32 KiB in flight.
        min_blocks_per_sm=max(1, 512 // threads),
    )


@cache
def long_norm_backward_kernel(spec: NormSpec, dy_dtype: DtypeName, aligned: bool) -> Kernel:
    """The same for rows of any length and alignment: each is read twice, and partial sums are accumulated in memory."""
    itemsize, dy_itemsize = ITEM_BYTES[spec.dtype], ITEM_BYTES[dy_dtype]
    quad_x, quad_dy = quad_reader(spec.dtype, aligned), quad_reader(dy_dtype, aligned)
    weights = quad_reader(spec.weight_dtype, aligned)
    normalize = _normalizer(spec)
    has_mean, has_bias = spec.has_mean, spec.has_bias
    rstd_pointer = rstd_address(spec.has_mean)
    store = _gradient_storer(spec, aligned, False)
    total = row_sum(THREADS)
    sum_bytes = 4 * (THREADS >> 5)  # bytes of shared memory for one sum
    buffer_bytes = 2 * sum_bytes

    @device
    def add(address, value, begun):
        store_f32(address, (load_f32(address) if begun else _ZERO) + value)

    def long_norm_backward(
        x, stride, dy, dy_stride, weight, statistics, dx, partials, partial_stride, rows, columns, offset
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        sum_buffer = i32(0)
        weight_partials = partials + i64(cuda.blockIdx.x) * partial_stride * 4
        bias_partials = weight_partials + i64(cuda.gridDim.x) * partial_stride * 4
        row = i64(cuda.blockIdx.x)
        while row < rows:
            # True if sums of the block's earlier rows exist; this thread has written those of its columns.
            begun = row >= i64(cuda.gridDim.x)
            x_row = x + row * stride * itemsize
            dy_row = dy + row * dy_stride * dy_itemsize
            rstd = load_f32(rstd_pointer(statistics, rows) + row * 4)
            mean = load_f32(statistics + row * 4) if has_mean else _ZERO
            g_mean, product_mean = _ZERO, _ZERO
            column = i64(4 * thread)
            while column < columns:
                normalized = normalize(quad_x(x_row, column, columns), mean, rstd)
                d = quad_dy(dy_row, column, columns)
                g = _weighted(d, weights(weight, column, columns), offset)
                g_mean += _sum(g[0], g[1], g[2], g[3])
                product_mean += _dot(g, normalized)
                for index in range(4):
                    if column + index < columns:
                        byte_offset = (column + index) * 4
                        add(weight_partials + byte_offset, d[index] * normalized[index], begun)
                        if has_bias:
                            add(bias_partials + byte_offset, d[index], begun)
                column += 4 * THREADS
            if has_mean:
                g_mean = divide(total(g_mean, smem + sum_buffer, thread), f32(columns))
            product_mean = divide(total(product_mean, smem + sum_buffer + sum_bytes, thread), f32(columns))
            sum_buffer ^= i32(buffer_bytes)
            column = i64(4 * thread)
            while column < columns:
                normalized = normalize(quad_x(x_row, column, columns), mean, rstd)
                d = quad_dy(dy_row, column, columns)
                g = _weighted(d, weights(weight, column, columns), offset)
                dx_address = dx + (row * columns + column) * itemsize
                store(dx_address, column, columns, g, normalized, g_mean, product_mean, rstd)
                column += 4 * THREADS
            row += i64(cuda.gridDim.x)

    return Kernel(
        f"long_norm_backward({spec}, {dy_dtype}, {aligned=})",
        long_norm_backward,
        _PARAMETERS,
        THREADS,
        shared_bytes=2 * buffer_bytes,
        min_blocks_per_sm=2,
    )
