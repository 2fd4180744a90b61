"""The transposed copy of a tensor of heads: stored by casts, or made from the codes of the row copy."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.casts.heads import GROUP
from cuda_kernels.attention.spec import HEAD_DIMS, ORDER_A, ROWS
from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import (
    dynamic_shared,
    load_4_if,
    quotient,
    shared_load_16,
    shared_store_16,
    store_16,
)
from cuda_kernels.device.tile import transpose_quads
from cuda_kernels.kernel import Kernel, typed


@cache
def make_column_store(threads: int) -> Any:
    """A device function ``(packed, shared, group, quad, thread, out, stride)`` that stores 128 rows' codes by channel.

    ``packed``: a thread's four channels of 16 rows, one register per row. ``shared``: 128 bytes per channel. ``group``,
    ``quad``: which 16 rows and which four channels. ``out``: the address of the block's first row in the first channel;
    ``stride``: between channels. Each group of 16 rows is stored in :data:`ORDER_A`. ``shared`` has its own swizzle,
    private to this function.
    """
    column_step = threads // 8
    order = ORDER_A

    @device
    def store_columns(packed, shared, group, quad, thread, out, stride):
        ordered = cuda.local.array(GROUP, u32)
        for place in range(GROUP):
            ordered[place] = packed[order[place]]
        transpose_quads(ordered)
        for step in range(4):  # the 16-byte chunks of a column are swizzled to avoid bank conflicts
            at = shared + (4 * quad + step) * ROWS + ((group ^ (quad & 7)) << 4)
            shared_store_16(at, ordered[4 * step], ordered[4 * step + 1], ordered[4 * step + 2], ordered[4 * step + 3])
        cuda.syncthreads()
        part = thread & 7
        for step in range(4):
            column = i32((thread >> 3) + step * column_step)
            codes = shared_load_16(shared + column * ROWS + ((part ^ (column >> 2 & 7)) << 4))
            store_16(out + i64(column) * stride + 16 * part, codes[0], codes[1], codes[2], codes[3])

    return store_columns


@cache
def transpose_heads_kernel(head_dim: int) -> Kernel:
    """The transposed copy of codes in packed rows (:mod:`cuda_kernels.attention.spec`): ``[H, R, D]`` to ``[H, D, R]``.

    Parameters are the addresses of both, the number of heads and of packed rows. A block has 128 rows of a head.
    """
    assert head_dim in HEAD_DIMS
    quads = head_dim // 4
    threads = quads * (ROWS // GROUP)
    store_columns = make_column_store(threads)

    def transpose_heads(codes, out, heads, packed_rows):
        thread = i32(cuda.threadIdx.x)
        block = quotient(cuda.blockIdx.x, heads)
        head = i32(cuda.blockIdx.x - block * heads)
        group = quotient(thread, quads)
        quad = i32(thread - group * quads)
        packed = cuda.local.array(GROUP, u32)
        address = codes + (i64(head) * packed_rows + block * ROWS + group * GROUP) * head_dim + 4 * quad
        for step in range(GROUP):
            packed[step] = load_4_if(address, True)
            address += head_dim
        out_address = out + i64(head) * head_dim * packed_rows + block * ROWS
        store_columns(packed, dynamic_shared(), group, quad, thread, out_address, i64(packed_rows))

    return Kernel(
        f"transpose_heads(d={head_dim})",
        transpose_heads,
        typed(i64, "codes out") | typed(i32, "heads packed_rows"),
        threads,
        shared_bytes=ROWS * head_dim,
        min_blocks_per_sm=max(1, 1024 // threads),
    )
