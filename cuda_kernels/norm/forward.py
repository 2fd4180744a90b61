"""RMSNorm in high precision, with rows in registers: one read of x, one write of the result."""

from __future__ import annotations

from functools import cache

from cuda_kernels.device.codec import quad_decoder, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import dynamic_shared, pack_halves, store_f32
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
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
from cuda_kernels.norm.statistics import NormSpec, row_statistics


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
    decode_rounded = quad_decoder(spec.dtype)
    parameters = parameter_quad(spec.weight_dtype)
    is_inside = inside_row(row_layout)
    store = quad_storer(out_dtype, True)
    registers_of_row, registers_of_quad = row_registers(spec.dtype, row_layout), quad_registers(spec.dtype)
    itemsize, out_itemsize = ITEM_BYTES[spec.dtype], ITEM_BYTES[out_dtype]
    weight_address = quad_address(ITEM_BYTES[spec.weight_dtype], row_layout)
    out_address = quad_address(out_itemsize, row_layout)
    row_thread_mask, shift = row_layout.threads_per_row - 1, row_layout.log2_threads
    rows_of_block = THREADS >> row_layout.log2_threads
    pack = pack_halves.get(spec.dtype)
    rounds = rounds_first and pack is not None

    @device
    def rounded(a, b, c, d):
        if not rounds:
            return a, b, c, d
        registers = cuda.local.array(2, u32)
        registers[0], registers[1] = pack(a, b), pack(c, d)
        return decode_rounded(registers, 0)

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
