"""What happens to a tile when its products are summed up: scaled, biased, observed, rounded, and stored."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.codec import raise_to
from cuda_kernels.device.fragments import (
    add_columns,
    largest_of_rows,
    scale_all,
    scale_columns,
    scale_rows,
    slice_of,
    store_all,
    store_fragment,
)
from cuda_kernels.device.language import asm, cuda, device, f32, i64, u32
from cuda_kernels.device.ptx import bits, from_bits, load_4_if, unsigned_max, warp_max
from cuda_kernels.device.sm90 import (
    fence_proxy_async_shared,
    named_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_commit,
    tma_store_wait,
)
from cuda_kernels.gemm.spec import Product, Scaling, Tile, chunk_columns, chunks_of, places

_CHUNK_BYTES = 64 * 128
"""64 rows of what a copy takes at a time."""


@cache
def finisher(product: Product, count: int, even: bool) -> Any:
    """A device function ``(acc, factors, row, m, column, n) -> acc``: scaled, with its bias, and observed.

    ``factors``: the product of two scales of tensors, and the addresses of both scales, bias and the largest magnitude
    seen. ``row``, ``column``: of the thread's first register in the result.
    """
    steps: list[Any] = []
    if product.scaling is Scaling.TENSOR:
        times = scale_all(count)
        steps.append(device(lambda acc, factors, row, m, column, n: times(acc, factors[0])))
    if product.scaling is Scaling.ROW:
        steps.append(_row_scaler(count, even))
    if product.bias:
        plus_bias = add_columns(count, product.bias, even)
        steps.append(device(lambda acc, factors, row, m, column, n: plus_bias(acc, factors[3], column, n)))
    if product.amax:
        steps.append(_observer(count, product.out))
    return _in_order(steps)


def _in_order(steps: list[Any]) -> Any:
    """What the compiler does not see costs it no time."""
    if not steps:
        return device(lambda acc, factors, row, m, column, n: acc)
    if len(steps) == 1:
        return steps[0]
    first = steps[0]
    rest = _in_order(steps[1:])

    @device
    def both(acc, factors, row, m, column, n):
        return rest(first(acc, factors, row, m, column, n), factors, row, m, column, n)

    return both


def _row_scaler(count: int, even: bool) -> Any:
    times_rows = scale_rows(count)
    times_columns = scale_columns(count, even)

    @device
    def scaled(acc, factors, row, m, column, n):
        s = from_bits(load_4_if(factors[1] + i64(row) * 4, row < m))
        u = from_bits(load_4_if(factors[1] + i64(row + 8) * 4, row + 8 < m))
        return times_columns(times_rows(acc, s, u), factors[2], column, n)

    return scaled


def _observer(count: int, out: str) -> Any:
    largest = largest_of_rows(count)
    rounded = _ROUNDED[out]

    @device
    def observed(acc, factors, row, m, column, n):
        above, below = largest(acc, n - column)
        value = warp_max(unsigned_max(above if row < m else u32(0), below if row + 8 < m else u32(0)))
        if cuda.threadIdx.x & 31 == 0:
            # Rounding keeps the order: the largest of rounded values is the largest, rounded.
            raise_to(factors[4], bits(rounded(from_bits(value))))
        return acc

    return observed


_ROUNDED = {
    "bfloat16": asm("{ .reg .b16 h, z; cvt.rn.bf16.f32 h, $1; mov.b16 z, 0; mov.b32 $0, {z, h}; }", f32, f32),
    "float16": asm("{ .reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.f32.f16 $0, h; }", f32, f32),
    "float32": asm("mov.f32 $0, $1;", f32, f32),
}
"""float32 to a dtype and back."""


@cache
def leaver(product: Product, tile: Tile) -> Any:
    """A device function ``(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n)``.

    It stores the 64 rows of a warpgroup; ``row``, ``column``: the first of them.
    """
    if tile.staged:
        return _chunks_from(0, product, tile)
    count = tile.columns // 2
    finish = finisher(product, count, tile.even)
    store = store_all(count, product.out, tile.even, product.accumulate)

    @device
    def leave(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n):
        lane = thread & 31
        first = row + (thread >> 5) * 16 + (lane >> 2)
        pair = column + 2 * (lane & 3)
        store(finish(acc, factors, first, m, pair, n), out, out_pitch, first, m, pair, n)

    return leave


def _chunks_from(chunk: int, product: Product, tile: Tile) -> Any:
    """:func:`leaver` through shared memory: rows of 128 bytes, so many columns at a time, from ``chunk`` on.

    Where they do not divide the tile's, the last copy begins earlier and takes some columns again.
    """
    wide = product.out == "float32"
    columns = chunk_columns(product.out)
    chunks = chunks_of(tile, product)
    start = min(chunk * columns, tile.columns - columns)
    count = columns // 2
    buffers = tile.buffers
    is_last = chunk == chunks - 1
    mine = chunk % buffers
    # The first of a tile may take the buffer that the last one before has filled: then it waits for all.
    all_at_first = chunks % buffers > 0
    free = 0 if all_at_first and chunk == 0 else buffers - 1
    waits = not all_at_first or chunk == 0 or chunk >= buffers
    part = slice_of(tile.columns // 2, start // 2, count)
    finish = finisher(product, count, tile.even)
    to_shared = store_fragment(count, product.out)
    at = places(tile, product.scaling)["out"]
    copy = tma_reduce_add if product.accumulate else tma_store

    @device
    def leave(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n):
        lane, warp = thread & 31, thread >> 5
        buffer = smem + at + (group * buffers + mine) * _CHUNK_BYTES
        if waits:
            if thread == 0:
                tma_store_wait(free)
            named_barrier(1 + group, 128)
        # Not before: what is loaded for all chunks together would not fit into registers.
        rest = finish(part(acc), factors, row + warp * 16 + (lane >> 2), m, column + (start + 2 * (lane & 3)), n)
        if wide:
            line = warp * 16 + (lane >> 2)
            to_shared(rest, buffer + line * 128 + (lane & 1) * 8, lane >> 1 & 1, line & 7)
        else:
            line = warp * 16 + (lane & 15)
            to_shared(rest, buffer + line * 128, lane >> 4, line & 7)
        fence_proxy_async_shared()
        named_barrier(1 + group, 128)
        if thread == 0:
            copy(map_out, buffer, column + start, row)
            tma_store_commit()

    if is_last:
        return leave
    others = _chunks_from(chunk + 1, product, tile)

    @device
    def leave_all(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n):
        leave(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n)
        others(acc, smem, map_out, out, out_pitch, factors, group, thread, row, m, column, n)

    return leave_all
