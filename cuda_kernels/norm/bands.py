"""Normalize and cast to FP8 with a given scale, rowwise and transposed, in one launch.

A block processes a band of 16 rows: first their statistics, then their codes, while the rows should still be in L2. The
16 codes of a column in a band are stored as one vector.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.device.codec import ITEM_BYTES, update_amax
from cuda_kernels.device.language import cuda, f32, i32, i64, u32
from cuda_kernels.device.ptx import divide, dynamic_shared, float8x4, load_f32, store_16, store_f32
from cuda_kernels.device.tile import THREADS, WARP_ROWS, WARPS, block_max, row_storer, transpose_quads
from cuda_kernels.kernel import Kernel, typed
from cuda_kernels.norm.statistics import NormSpec, long_row_statistics, normalized_loader, rstd_address

BAND = WARP_ROWS
_ONE = np.float32(1)


@cache
def normalize_bands_kernel(spec: NormSpec, aligned: bool, fp8: str, rowwise: bool, observe: bool) -> Kernel:
    """``statistics`` as in ``statistics.py``; ``out [rows, columns]`` if ``rowwise``, and ``out_t [columns, rows]``.

    ``scale_ptr [1]`` must not be 0. ``observe`` updates ``amax_out [1]`` with the tensor's amax. Strides of both copies
    are multiples of 16; the padding is filled with zeros. ``aligned``: see ``normalized_loader``.
    """
    loader = normalized_loader(spec, aligned)
    pack = float8x4[fp8]
    load, decode, maxima, num_registers = loader.load, loader.decode, loader.maxima, loader.num_registers
    n_maxima, clear, fold, amax_of = maxima.num_registers, maxima.clear, maxima.fold, maxima.largest
    store_rows = row_storer(loader.vector)
    statistics = long_row_statistics(spec.dtype, spec.has_mean, aligned, 32)
    rstd_pointer = rstd_address(spec.has_mean)
    has_mean = spec.has_mean
    itemsize = ITEM_BYTES[spec.dtype]

    def normalize_bands(
        loader_args, scale_ptr, amax_out, out, out_scale_inv, out_t,
        rows, columns, eps, out_stride, out_t_stride,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        smem = dynamic_shared()
        lane, warp = thread & 31, thread >> 5
        first_row = i32(BAND * cuda.blockIdx.x)
        x_address, x_stride, _, _, statistics_address, _ = loader_args
        for index in range(BAND // WARPS):
            row = first_row + warp + i32(WARPS * index)
            address = x_address + i64(row) * x_stride * itemsize
            m, r = statistics(address, columns, row < rows, lane, eps, smem, thread)
            if lane == 0 and row < rows:
                if has_mean:
                    store_f32(statistics_address + i64(row) * 4, m)
                store_f32(rstd_pointer(statistics_address, rows) + i64(row) * 4, r)
        cuda.syncthreads()

        scale = load_f32(scale_ptr)
        start = i32(0)
        running_max = cuda.local.array(n_maxima, u32)
        clear(running_max)
        if cuda.blockIdx.x == 0 and thread == 0:
            store_f32(out_scale_inv, divide(_ONE, scale))
        while start < columns:
            column = i32(start + 4 * thread)
            registers, packed = cuda.local.array(num_registers, u32), cuda.local.array(WARP_ROWS, u32)
            load(loader_args, rows, columns, first_row, column, False, registers)
            for quad_index in range(WARP_ROWS):
                a, b, c, d = decode(registers, quad_index)
                packed[quad_index] = pack(a * scale, b * scale, c * scale, d * scale)
                if observe:
                    fold(registers, quad_index, (a, b, c, d), running_max)
            if rowwise:
                store_rows(packed, out, out_stride, first_row, rows, column, False)
            transpose_quads(packed)
            for index in range(4):
                if column + index < columns:
                    address = out_t + i64(column + index) * out_t_stride + i64(first_row)
                    store_16(
                        address, packed[4 * index], packed[4 * index + 1], packed[4 * index + 2], packed[4 * index + 3]
                    )
            start = i32(start + 4 * THREADS)
        if observe:
            amax_bits = block_max(amax_of(running_max), smem, thread)
            if thread == 0:
                update_amax(amax_out, amax_bits)

    return Kernel(
        f"normalize_bands({spec}, {aligned=}, {fp8}, {rowwise=}, {observe=})",
        normalize_bands,
        {
            "loader_args": loader.args_type,
            **typed(i64, "scale_ptr amax_out out out_scale_inv out_t"),
            **typed(i32, "rows columns"),
            "eps": f32,
            **typed(i64, "out_stride out_t_stride"),
        },
        THREADS,
        shared_bytes=32,
        min_blocks_per_sm=loader.min_blocks_per_sm,
    )
