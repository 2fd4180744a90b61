"""Normalize and cast to FP8 with one scale, or RMSNorm in high precision: rows in registers, so that x is read once.

The scale is delayed scaling's, or 0 if the tensor's own amax is to be used, which is known only after all rows were
read. The host does not synchronize to find out. Two kernels run: ``normalize`` casts with a nonzero scale, and
otherwise stores the amax of each block. ``cast_normalized`` returns at once with a nonzero scale; otherwise it reads x
again, and casts with the scale from these amaxes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import (
    FP8_MAX,
    amax_to_scale,
    magnitude,
    quad_decoder,
    quad_registers,
    update_amax,
)
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    divide,
    dynamic_shared,
    float8x4,
    from_bits,
    larger_magnitudes,
    load_f32,
    pack_halves,
    store_4,
    store_8,
    store_f32,
)
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.tile import block_max, reduce_block_amax
from cuda_kernels.kernel import Kernel, typed
from cuda_kernels.norm.rows import (
    THREADS,
    RowLayout,
    inside_row,
    parameter_quad,
    quad_address,
    quad_column,
    quad_storer,
    row_loader,
    row_registers,
)
from cuda_kernels.norm.statistics import NormSpec, normalizer, row_statistics, rstd_address

_ONE, _ZERO = np.float32(1), np.float32(0)
_ALL = np.uint32(0xFFFFFFFF)


def _row_caster(spec: NormSpec, fp8: str, row_layout: RowLayout) -> Any:
    """A device function that normalizes the row in registers, stores its codes if ``stored``, and returns its amax.

    ``codes``: the address of the thread's first code.
    """
    quads = row_layout.quads_per_thread
    last = row_layout.quads_per_vec - 1
    column_of = quad_column(row_layout)
    registers_of_quad = quad_registers(spec.dtype)
    itemsize = ITEM_BYTES[spec.weight_dtype]
    has_bias = spec.has_bias
    decode = quad_decoder(spec.dtype)
    parameters = parameter_quad(spec.weight_dtype)
    normalize = normalizer(spec)
    pack = float8x4[fp8]
    is_inside = inside_row(row_layout)
    larger = larger_magnitudes["float32"]
    parameter_address, code_address = quad_address(itemsize, row_layout), quad_address(1, row_layout)

    @device
    def cast(registers, columns, thread_in_row, weight, bias, offset, mean, rstd, scale, codes, stride, stored):
        largest = _ZERO
        packed = cuda.local.array(2, u32)
        for quad in range(quads):
            column = column_of(quad, thread_in_row)
            part = quad & last
            in_bounds = is_inside(column, columns)
            mask = _ALL if in_bounds else u32(0)
            a, b, c, d = decode(registers, quad * registers_of_quad)
            w0, w1, w2, w3 = parameters(parameter_address(weight, quad, thread_in_row), in_bounds)
            bias0, bias1, bias2, bias3 = parameters(
                parameter_address(bias, quad, thread_in_row), in_bounds and has_bias
            )
            a = normalize(a, mean, rstd, w0 + offset, bias0)
            b = normalize(b, mean, rstd, w1 + offset, bias1)
            c = normalize(c, mean, rstd, w2 + offset, bias2)
            d = normalize(d, mean, rstd, w3 + offset, bias3)
            quad_max = larger(larger(a, b), larger(c, d))
            largest = larger(largest, quad_max if in_bounds else _ZERO)
            packed[part] = pack(a * scale, b * scale, c * scale, d * scale) & mask
            if part == last and stored and is_inside(column, stride):
                if last:
                    store_8(code_address(codes, quad - 1, 0), packed[0], packed[1])
                else:
                    store_4(code_address(codes, quad, 0), packed[0])
        return largest

    return cast


def _min_blocks_per_sm(spec: NormSpec, row_layout: RowLayout) -> int:
    return 2 if row_registers(spec.dtype, row_layout) > 32 or spec.has_bias else 3


@cache
def normalize_kernel(spec: NormSpec, fp8: str, row_layout: RowLayout, observe: bool) -> Kernel:
    """``statistics`` as in ``statistics.py``, and ``out [rows, columns]`` if ``scale_ptr [1]`` is not 0.

    Without a scale, or if it is 0, blocks store their amaxes in ``block_amax [blocks]``. A block processes every n-th
    group of rows. ``observe`` updates ``amax_out [1]``. ``out_stride`` is a multiple of 16; the padding is filled with
    zeros.
    """
    load_row = row_loader(spec.dtype, row_layout)
    statistics_of_row = row_statistics(spec.dtype, spec.has_mean, row_layout)
    cast = _row_caster(spec, fp8, row_layout)
    has_mean = spec.has_mean
    rstd_pointer = rstd_address(spec.has_mean)
    registers_of_row = row_registers(spec.dtype, row_layout)
    itemsize = ITEM_BYTES[spec.dtype]
    row_thread_mask, shift, rows_of_block = row_layout.in_block
    larger = larger_magnitudes["float32"]
    code_address = quad_address(1, row_layout)

    def normalize(
        x, stride, weight, bias, statistics, scale_ptr, block_amax, amax_out, out, out_scale_inv,
        rows, columns, offset, eps, out_stride,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        thread_in_row = thread & row_thread_mask
        scale = _ZERO
        if scale_ptr != 0:
            scale = load_f32(scale_ptr)
        largest = _ZERO
        sum_buffer = i32(0)
        first_row = i64(cuda.blockIdx.x) * rows_of_block
        # The address is advanced by additions; a product would be computed again for each of a row's stores.
        codes = code_address(out + (first_row + (thread >> shift)) * out_stride, 0, thread_in_row)
        while first_row < rows:
            row = first_row + (thread >> shift)
            in_bounds = row < rows
            registers = cuda.local.array(registers_of_row, u32)
            # A thread without a row reads the last row again, which does not change the amax.
            load_row(x + (row if in_bounds else i64(rows - 1)) * stride * itemsize, columns, thread_in_row, registers)
            m, r = statistics_of_row(registers, columns, thread_in_row, eps, smem + sum_buffer, thread)
            if thread_in_row == 0 and in_bounds:
                if has_mean:
                    store_f32(statistics + row * 4, m)
                store_f32(rstd_pointer(statistics, rows) + row * 4, r)
            stored = in_bounds and scale != _ZERO
            amax = cast(registers, columns, thread_in_row, weight, bias, offset, m, r, scale, codes, out_stride, stored)
            largest = larger(largest, amax)
            sum_buffer ^= i32(64)  # alternate: a warp may write sums of the next rows while another reads these
            first_row += i64(cuda.gridDim.x) * rows_of_block
            codes += i64(cuda.gridDim.x) * rows_of_block * out_stride
        if observe or scale == _ZERO:
            block_max_bits = block_max(magnitude(largest), smem + 128, thread)
            if thread == 0:
                if scale == _ZERO:
                    store_f32(block_amax + i64(cuda.blockIdx.x) * 4, from_bits(block_max_bits))
                if observe:
                    update_amax(amax_out, block_max_bits)
        if scale != _ZERO and cuda.blockIdx.x == 0 and thread == 0:
            store_f32(out_scale_inv, divide(_ONE, scale))

    return Kernel(
        f"normalize({spec}, {fp8}, {row_layout}, {observe=})",
        normalize,
        {
            **typed(i64, "x stride weight bias statistics scale_ptr block_amax amax_out out out_scale_inv"),
            **typed(i32, "rows columns"),
            **typed(f32, "offset eps"),
            "out_stride": i64,
        },
        THREADS,
        shared_bytes=160,
        min_blocks_per_sm=_min_blocks_per_sm(spec, row_layout),
    )


@cache
def cast_normalized_kernel(spec: NormSpec, fp8: str, row_layout: RowLayout) -> Kernel:
    """``out [rows, columns]`` with the scale from ``block_amax``; no-op if ``scale_ptr [1]`` is given and not 0."""
    # Without a barrier between rows, the assembler would keep all weights in registers, unless loads are predicated.
    predicated = replace(row_layout, full=False)
    load_row = row_loader(spec.dtype, row_layout)
    cast = _row_caster(spec, fp8, predicated)
    registers_of_row = row_registers(spec.dtype, row_layout)
    itemsize = ITEM_BYTES[spec.dtype]
    has_mean = spec.has_mean
    fp8_max = FP8_MAX[fp8]
    rstd_pointer = rstd_address(spec.has_mean)
    row_thread_mask, shift, rows_of_block = row_layout.in_block
    code_address = quad_address(1, row_layout)

    def cast_normalized(
        x, stride, weight, bias, statistics, scale_ptr, block_amax, out, out_scale_inv,
        rows, columns, offset, num_block_amax, power_2, epsilon, out_stride,
    ):  # fmt: skip
        if scale_ptr != 0 and load_f32(scale_ptr) != _ZERO:
            return
        thread = cuda.threadIdx.x
        thread_in_row = thread & row_thread_mask
        amax = from_bits(reduce_block_amax(block_amax, num_block_amax, dynamic_shared(), thread))
        scale = amax_to_scale(amax, fp8_max, power_2, epsilon)
        if cuda.blockIdx.x == 0 and thread == 0:
            store_f32(out_scale_inv, divide(_ONE, scale))
        row = i64(cuda.blockIdx.x) * rows_of_block + (thread >> shift)
        while row < rows:
            registers = cuda.local.array(registers_of_row, u32)
            load_row(x + row * stride * itemsize, columns, thread_in_row, registers)
            m = load_f32(statistics + row * 4) if has_mean else _ZERO
            r = load_f32(rstd_pointer(statistics, rows) + row * 4)
            codes = code_address(out + row * out_stride, 0, thread_in_row)
            cast(registers, columns, thread_in_row, weight, bias, offset, m, r, scale, codes, out_stride, True)
            row += i64(cuda.gridDim.x) * rows_of_block

    return Kernel(
        f"cast_normalized({spec}, {fp8}, {row_layout})",
        cast_normalized,
        {
            **typed(i64, "x stride weight bias statistics scale_ptr block_amax out out_scale_inv"),
            **typed(i32, "rows columns"),
            "offset": f32,
            **typed(i32, "num_block_amax power_2"),
            "epsilon": f32,
            "out_stride": i64,
        },
        THREADS,
        shared_bytes=32,
        min_blocks_per_sm=_min_blocks_per_sm(spec, row_layout),
    )


@cache
def rms_norm_kernel(spec: NormSpec, out_dtype: DtypeName, rounds_first: bool, row_layout: RowLayout) -> Kernel:
    """``out [rows, columns]``, contiguous, and ``statistics [rows]``.

    ``rounds_first``: x rstd is rounded to x's dtype before it is multiplied by the weight.
    """
    quads = row_layout.quads_per_thread
    load_row = row_loader(spec.dtype, row_layout)
    statistics_of_row = row_statistics(spec.dtype, False, row_layout)
    column_of = quad_column(row_layout)
    decode = quad_decoder(spec.dtype)
    parameters = parameter_quad(spec.weight_dtype)
    is_inside = inside_row(row_layout)
    store = quad_storer(out_dtype, True)
    registers_of_row, registers_of_quad = row_registers(spec.dtype, row_layout), quad_registers(spec.dtype)
    itemsize, out_itemsize = ITEM_BYTES[spec.dtype], ITEM_BYTES[out_dtype]
    weight_address = quad_address(ITEM_BYTES[spec.weight_dtype], row_layout)
    out_address = quad_address(out_itemsize, row_layout)
    row_thread_mask, shift, rows_of_block = row_layout.in_block
    pack = pack_halves.get(spec.dtype)
    rounds = rounds_first and pack is not None

    @device
    def rounded(a, b, c, d):
        if not rounds:
            return a, b, c, d
        registers = cuda.local.array(2, u32)
        registers[0], registers[1] = pack(a, b), pack(c, d)
        return decode(registers, 0)

    def rms_norm(x, stride, weight, statistics, out, rows, columns, offset, eps):
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        thread_in_row = thread & row_thread_mask
        sum_buffer = i32(0)
        first_row = i64(cuda.blockIdx.x) * rows_of_block
        while first_row < rows:
            row = first_row + (thread >> shift)
            in_bounds = row < rows
            registers = cuda.local.array(registers_of_row, u32)
            load_row(x + (row if in_bounds else i64(rows - 1)) * stride * itemsize, columns, thread_in_row, registers)
            _, r = statistics_of_row(registers, columns, thread_in_row, eps, smem + sum_buffer, thread)
            if thread_in_row == 0 and in_bounds:
                store_f32(statistics + row * 4, r)
            for quad in range(quads):
                column = column_of(quad, thread_in_row)
                a, b, c, d = decode(registers, quad * registers_of_quad)
                w0, w1, w2, w3 = parameters(weight_address(weight, quad, thread_in_row), is_inside(column, columns))
                a, b, c, d = rounded(a * r, b * r, c * r, d * r)
                store(
                    out_address(out + row * columns * out_itemsize, quad, thread_in_row), column,
                    columns if in_bounds else i32(0),
                    a * (w0 + offset), b * (w1 + offset), c * (w2 + offset), d * (w3 + offset),
                )  # fmt: skip
            sum_buffer ^= i32(64)
            first_row += i64(cuda.gridDim.x) * rows_of_block

    return Kernel(
        f"rms_norm({spec}, {out_dtype}, {rounds_first=}, {row_layout})",
        rms_norm,
        {
            **typed(i64, "x stride weight statistics out"),
            **typed(i32, "rows columns"),
            **typed(f32, "offset eps"),
        },
        THREADS,
        shared_bytes=128,
        min_blocks_per_sm=2,
    )
