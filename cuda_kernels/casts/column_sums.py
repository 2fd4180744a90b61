"""Sums over columns in two stages, in an order that does not depend on the scheduling of blocks.

In the first stage, kernels that read the values also store partial sums, float32 ``[n, stride]``: casts by
:func:`summed_loader`, norms in ``cuda_kernels/norm/backward.py``. In the second stage :func:`column_sums_kernel` adds
them: warp w of a block adds partial sums w, w + 32, w + 64, ... in order, then the first warp adds the sums of warps 0
to 31.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from cuda_kernels.device.codec import element_storer
from cuda_kernels.device.language import cuda, device, f32, i32, i64
from cuda_kernels.device.ptx import bits, dynamic_shared, from_bits, load_f32, shared_load_4, shared_store_4, store_16
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName
from cuda_kernels.device.tile import WARP_ROWS, TileLoader
from cuda_kernels.kernel import Kernel, typed

COLUMNS = 32
"""Columns of a block: a warp reads 128 bytes of a row of partial sums."""
_WARPS = 32
_AHEAD = 8
"""Rows that a warp loads at a time, so that the loads overlap."""
_ZERO = np.float32(0)


@cache
def summed_loader(loader: TileLoader) -> TileLoader:
    """``loader`` that also stores the sums of a tile's columns over every 16 rows.

    Arguments: those of ``loader``, and the address of the partial sums, float32 ``[ceil(rows / 16), stride]``, where
    ``stride`` is the number of columns rounded up to a multiple of four.
    """
    load_values, decode, partials = loader.load, loader.decode, loader.num_args

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        load_values(args, rows, columns, first_row, column, full_tile, registers)
        sum_a, sum_b, sum_c, sum_d = _ZERO, _ZERO, _ZERO, _ZERO
        for quad_index in range(WARP_ROWS):
            a, b, c, d = decode(registers, quad_index)
            sum_a, sum_b, sum_c, sum_d = sum_a + a, sum_b + b, sum_c + c, sum_d + d
        if first_row < rows and column < columns:
            stride = i64(columns + 3) & i64(-4)
            address = args[partials] + ((i64(first_row) >> 4) * stride + i64(column)) * 4
            store_16(address, bits(sum_a), bits(sum_b), bits(sum_c), bits(sum_d))

    return replace(loader, name=f"{loader.name}, summed", num_args=loader.num_args + 1, load=load)


@cache
def column_sums_kernel(dtype: DtypeName) -> Kernel:
    """``out [columns]`` of ``dtype`` from partial sums ``[n, stride]``, and ``other`` from a second ``[n, stride]``.

    A block processes :data:`COLUMNS` columns; twice as many blocks also compute the second sums.
    """
    item = ITEM_BYTES[dtype]
    store = element_storer(dtype)

    def column_sums(partials, out, other, stride, n, columns):
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        across = (columns + i32(COLUMNS - 1)) >> i32(5)
        block = cuda.blockIdx.x
        if block >= across:
            block = block - across
            partials = partials + i64(n) * stride * 4
            out = other
        column = block * COLUMNS + lane
        inside = column < columns
        loaded = cuda.local.array(_AHEAD, f32)
        total = _ZERO
        first_row = i32(warp)
        while first_row < n:
            for step in range(_AHEAD):
                row = first_row + _WARPS * step
                loaded[step] = _ZERO
                if inside and row < n:
                    loaded[step] = load_f32(partials + (i64(row) * stride + column) * 4)
            for step in range(_AHEAD):
                total += loaded[step]
            first_row += _WARPS * _AHEAD
        smem = dynamic_shared()
        shared_store_4(smem + thread * 4, bits(total))
        cuda.syncthreads()
        if warp == 0 and inside:
            total = _ZERO
            for other_warp in range(_WARPS):
                total += from_bits(shared_load_4(smem + (other_warp * COLUMNS + lane) * 4))
            store(out + i64(column) * item, total)

    return Kernel(
        f"column_sums({dtype})",
        column_sums,
        typed(i64, "partials out other stride") | typed(i32, "n columns"),
        COLUMNS * _WARPS,
        shared_bytes=COLUMNS * _WARPS * 4,
    )
