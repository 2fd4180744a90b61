"""Means of heads over their sequences, in a fixed order of additions: over blocks of 128 rows, then over blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.attention.casts.heads import GROUP, HeadsSpec, make_heads_reader
from cuda_kernels.attention.spec import ROWS
from cuda_kernels.device.codec import INFINITY_BITS, magnitude, quad_decoder, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    bits,
    divide,
    dynamic_shared,
    from_bits,
    load_8_if,
    load_16_if,
    quotient,
    shared_load_16,
    shared_store_16,
    store_16,
)
from cuda_kernels.kernel import Kernel, typed

_GROUPS = ROWS // GROUP
_ZERO = np.float32(0)


@device
def _finite(value):
    return value if magnitude(value) < INFINITY_BITS else _ZERO


@cache
def _make_group_sum(quads: int) -> Any:
    """A device function ``(a, b, c, d, shared, group, quad)``: four sums over the block's groups of threads, in order.

    The first group gets the results; ``shared``: 16 bytes per thread.
    """

    @device
    def group_sum(a, b, c, d, shared, group, quad):
        shared_store_16(shared + (group * quads + quad) * 16, bits(a), bits(b), bits(c), bits(d))
        cuda.syncthreads()
        if group == 0:
            for other in range(1, _GROUPS):
                found = shared_load_16(shared + (other * quads + quad) * 16)
                a += from_bits(found[0])
                b += from_bits(found[1])
                c += from_bits(found[2])
                d += from_bits(found[3])
        return a, b, c, d

    return group_sum


@cache
def sum_heads_kernel(spec: HeadsSpec) -> Kernel:
    """Sums of a tensor of heads over 128 rows, of finite values: float32 ``[H, R / 128, D]``.

    Parameters are the addresses of x, of the table of its rows and of the sums; the number of heads and of packed rows;
    and x's strides in elements, between sequences, rows and heads.
    """
    head_dim, quads = spec.head_dim, spec.quads
    registers_of_quad = quad_registers(spec.dtype)
    read, decode = make_heads_reader(spec), quad_decoder(spec.dtype)
    group_sum = _make_group_sum(quads)
    num_registers = GROUP * registers_of_quad

    @device
    def add_up(registers, only_finite):
        sum_a, sum_b, sum_c, sum_d = _ZERO, _ZERO, _ZERO, _ZERO
        for step in range(GROUP):
            a, b, c, d = decode(registers, step * registers_of_quad)
            if only_finite:
                a, b, c, d = _finite(a), _finite(b), _finite(c), _finite(d)
            sum_a, sum_b, sum_c, sum_d = sum_a + a, sum_b + b, sum_c + c, sum_d + d
        return sum_a, sum_b, sum_c, sum_d

    def sum_heads(x, table, sums, heads, packed_rows, stride_b, stride_l, stride_h):
        registers = cuda.local.array(num_registers, u32)
        block = i32(cuda.blockIdx.x)
        head, _, packed_row, _, group, quad = read(block, x, table, heads, stride_b, stride_l, stride_h, registers)
        a, b, c, d = add_up(registers, False)
        # A non-finite value makes the sum non-finite; only then is each value checked.
        if magnitude((a - a) + (b - b) + (c - c) + (d - d)) != u32(0):
            a, b, c, d = add_up(registers, True)
        a, b, c, d = group_sum(a, b, c, d, dynamic_shared(), group, quad)
        if group == 0:
            place = (i64(head) * (packed_rows >> 7) + (packed_row >> 7)) * head_dim + 4 * quad
            store_16(sums + place * 4, bits(a), bits(b), bits(c), bits(d))

    return Kernel(
        f"sum_heads({spec})",
        sum_heads,
        {
            **typed(i64, "x table sums"),
            **typed(i32, "heads packed_rows"),
            **typed(i64, "stride_b stride_l stride_h"),
        },
        spec.threads,
        shared_bytes=16 * spec.threads,
        min_blocks_per_sm=max(1, 512 // spec.threads),
    )


@cache
def mean_heads_kernel(head_dim: int) -> Kernel:
    """Means over sequences, float32 ``[H, sequences, D]``, from sums over 128 rows each; non-finite means become 0.

    Parameters are the addresses of the sums, of the table of sequences (int32 ``[sequences, 2]``: the first block of
    128 rows, the number of rows) and of the means; the number of heads, of packed rows and of sequences.
    """
    quads = head_dim // 4
    threads = quads * _GROUPS
    group_sum = _make_group_sum(quads)

    def mean_heads(sums, table, means, heads, packed_rows, sequences):
        thread = i32(cuda.threadIdx.x)
        sequence = quotient(cuda.blockIdx.x, heads)
        head = i32(cuda.blockIdx.x - sequence * heads)
        entry = load_8_if(table + i64(sequence) * 8, True)
        first_block, rows = i32(entry[0]), i32(entry[1])
        group = quotient(thread, quads)
        quad = i32(thread - group * quads)
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        place = (i64(head) * (packed_rows >> 7) + first_block) * head_dim + 4 * quad
        for block in range(group, i32(i32(rows + ROWS - 1) >> 7), _GROUPS):
            found = load_16_if(sums + (place + i64(block) * head_dim) * 4, True)
            a += from_bits(found[0])
            b += from_bits(found[1])
            c += from_bits(found[2])
            d += from_bits(found[3])
        a, b, c, d = group_sum(a, b, c, d, dynamic_shared(), group, quad)
        if group == 0:
            count = f32(max(rows, i32(1)))
            a, b, c, d = divide(a, count), divide(b, count), divide(c, count), divide(d, count)
            place = (i64(head) * sequences + sequence) * head_dim + 4 * quad
            store_16(means + place * 4, bits(_finite(a)), bits(_finite(b)), bits(_finite(c)), bits(_finite(d)))

    return Kernel(
        f"mean_heads(d={head_dim})",
        mean_heads,
        typed(i64, "sums table means") | typed(i32, "heads packed_rows sequences"),
        threads,
        shared_bytes=16 * threads,
    )
