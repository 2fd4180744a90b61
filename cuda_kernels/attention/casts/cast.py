"""The cast of attention's operands: E4M3, one scale per head and 128 rows, row and transposed copies, from one read.

The numerics are those of the reference's ``cast``: non-finite values become NaN and are ignored in scales; a mean over
the sequence may be subtracted first. A block holds 128 rows of a head in registers. A thread has four channels of 16
rows, which it transposes to four columns of 16 codes by itself. The transposed copy can also be made later, from the
codes of the row copy.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.attention.casts.heads import GROUP, HeadsSpec, make_heads_reader
from cuda_kernels.attention.spec import HEAD_DIMS, ORDER_A, ROWS
from cuda_kernels.device.codec import (
    FP8_MAX,
    INFINITY_BITS,
    amax_to_scale,
    decoded_maxima,
    magnitude,
    packed_maxima,
    quad_decoder,
    quad_registers,
)
from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import (
    bits,
    divide,
    dynamic_shared,
    float8x4,
    from_bits,
    load_4_if,
    load_16_if,
    quotient,
    shared_load_4,
    shared_load_16,
    shared_store_4,
    shared_store_16,
    shuffle,
    store_4,
    store_16,
    store_f32,
    unsigned_max,
    warp_max,
)
from cuda_kernels.device.tile import transpose_quads
from cuda_kernels.kernel import Kernel, typed

_ONE, _ZERO, _NAN = np.float32(1), np.float32(0), np.float32(np.nan)
_LARGEST = np.uint32(0x7F7FFFFF)
AMAX_BYTES = 128
"""Shared memory of two maxima over a block; that of transposed codes lies behind."""


def _block_max(warps: int) -> Any:
    """A device function ``(value, shared, thread)``: the maximum of all threads' ``value``; ``shared``: 64 bytes."""

    @device
    def block_max(value, shared, thread):
        value = warp_max(value)
        lane = thread & 31
        if lane == 0:
            shared_store_4(shared + (thread >> 5) * 4, value)
        cuda.syncthreads()
        return warp_max(shared_load_4(shared + (lane if lane < warps else 0) * 4))

    return block_max


@device
def _finite_magnitude(value, raw):
    """The bits of ``|value|``, or 0 if ``raw`` is not finite; an infinite difference counts as the largest number."""
    found = magnitude(value)
    found = found if found < INFINITY_BITS else _LARGEST
    return found if magnitude(raw) < INFINITY_BITS else u32(0)


@device
def _same_again(mean, lane):
    """``mean``, opaque to the compiler, so that differences are recomputed rather than kept in registers."""
    return (
        from_bits(shuffle(bits(mean[0]), lane)),
        from_bits(shuffle(bits(mean[1]), lane)),
        from_bits(shuffle(bits(mean[2]), lane)),
        from_bits(shuffle(bits(mean[3]), lane)),
    )


@device
def _finite_or_nan(value, raw):
    return value if magnitude(raw) < INFINITY_BITS else _NAN


def _decoder(spec: HeadsSpec, centered: bool) -> Any:
    """A device function ``(registers, step, mean, rows_left) -> four float32`` of row ``step``.

    If ``centered``, their channels' ``mean`` is subtracted in the first ``rows_left`` rows, and the others are 0.
    """
    registers_of_quad = quad_registers(spec.dtype)
    decode_quad = quad_decoder(spec.dtype)

    @device
    def decode(registers, step, mean, rows_left):
        return decode_quad(registers, step * registers_of_quad)

    @device
    def decode_centered(registers, step, mean, rows_left):
        a, b, c, d = decode_quad(registers, step * registers_of_quad)
        inside = step < rows_left
        return (
            a - mean[0] if inside else _ZERO,
            b - mean[1] if inside else _ZERO,
            c - mean[2] if inside else _ZERO,
            d - mean[3] if inside else _ZERO,
        )

    return decode_centered if centered else decode


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


@cache
def make_heads_cast(spec: HeadsSpec, rowwise: bool, columnwise: bool, centered: bool) -> Any:
    """A device function that casts 128 rows of a tensor of heads.

    Arguments are the index of the rows in all heads, 16 registers for codes; the addresses of x, of the table of its
    rows, of the means (float32 ``[H, sequences, D]``), of the row copy, the transposed copy and ``scale_inv``; the
    number of heads, of packed rows and of sequences; and x's strides in elements, between sequences, rows and heads.
    The results are those of :func:`make_heads_reader`, without the sequence, and the rows' ``scale_inv``.
    """
    head_dim, warps = spec.head_dim, spec.threads // 32
    read, decode, decode_raw = make_heads_reader(spec), _decoder(spec, centered), _decoder(spec, False)
    maxima = decoded_maxima() if centered or spec.dtype == "float32" else packed_maxima(spec.dtype)
    n_kept, clear, fold, largest = maxima.num_registers, maxima.clear, maxima.fold, maxima.largest
    num_registers = GROUP * quad_registers(spec.dtype)
    block_max = _block_max(warps)
    pack = float8x4["e4m3"]
    fp8_max = FP8_MAX["e4m3"]
    store_columns = make_column_store(spec.threads)

    @device
    def cast(
        block, packed, x, table, means, out, out_t, scale_inv, heads, packed_rows, sequences,
        stride_b, stride_l, stride_h,
    ):  # fmt: skip
        thread = i32(cuda.threadIdx.x)
        smem = dynamic_shared()
        registers = cuda.local.array(num_registers, u32)
        head, sequence, packed_row, rows_left, group, quad = read(
            block, x, table, heads, stride_b, stride_l, stride_h, registers
        )
        mean = (_ZERO, _ZERO, _ZERO, _ZERO)
        if centered:
            found = load_16_if(means + ((i64(head) * sequences + sequence) * head_dim + 4 * quad) * 4, True)
            mean = (from_bits(found[0]), from_bits(found[1]), from_bits(found[2]), from_bits(found[3]))

        kept = cuda.local.array(n_kept, u32)
        clear(kept)
        for step in range(GROUP):
            fold(registers, step, decode(registers, step, mean, rows_left), kept)
        amax_bits = block_max(largest(kept), smem, thread)
        if centered:
            mean = _same_again(mean, thread & 31)
        finite = amax_bits < INFINITY_BITS
        if not finite:
            of_finite = u32(0)
            for step in range(GROUP):
                quad_values, raw = (
                    decode(registers, step, mean, rows_left),
                    decode_raw(registers, step, mean, rows_left),
                )
                for index in range(4):
                    of_finite = unsigned_max(of_finite, _finite_magnitude(quad_values[index], raw[index]))
            amax_bits = block_max(of_finite, smem + 64, thread)
        scale = amax_to_scale(from_bits(amax_bits), fp8_max, False, _ZERO)
        inverse = divide(_ONE, scale)
        if thread == 0:
            store_f32(scale_inv + (i64(head) * (packed_rows >> 7) + (packed_row >> 7)) * 4, inverse)

        for step in range(GROUP):
            a, b, c, d = decode(registers, step, mean, rows_left)
            if not finite:
                raw = decode_raw(registers, step, mean, rows_left)
                a, b = _finite_or_nan(a, raw[0]), _finite_or_nan(b, raw[1])
                c, d = _finite_or_nan(c, raw[2]), _finite_or_nan(d, raw[3])
            packed[step] = pack(a * scale, b * scale, c * scale, d * scale)
        if rowwise:
            address = out + (i64(head) * packed_rows + packed_row + group * GROUP) * head_dim + 4 * quad
            for step in range(GROUP):
                store_4(address, packed[step])
                address += head_dim
        if columnwise:
            out_address = out_t + i64(head) * head_dim * packed_rows + packed_row
            store_columns(packed, smem + AMAX_BYTES, group, quad, thread, out_address, i64(packed_rows))
        return head, packed_row, rows_left, group, quad, inverse

    return cast


@cache
def quantize_heads_kernel(spec: HeadsSpec, rowwise: bool, columnwise: bool, centered: bool) -> Kernel:
    """Codes of a tensor of heads in packed rows, with one scale per head and 128 rows; see :mod:`.spec`.

    Parameters are those of :func:`make_heads_cast` from x on.
    """
    cast = make_heads_cast(spec, rowwise, columnwise, centered)

    def quantize_heads(
        x, table, means, out, out_t, scale_inv, heads, packed_rows, sequences, stride_b, stride_l, stride_h
    ):
        cast(
            i32(cuda.blockIdx.x), cuda.local.array(GROUP, u32), x, table, means, out, out_t, scale_inv,
            heads, packed_rows, sequences, stride_b, stride_l, stride_h,
        )  # fmt: skip

    return Kernel(
        f"quantize_heads({spec}, {rowwise=}, {columnwise=}, {centered=})",
        quantize_heads,
        {
            **typed(i64, "x table means out out_t scale_inv"),
            **typed(i32, "heads packed_rows sequences"),
            **typed(i64, "stride_b stride_l stride_h"),
        },
        spec.threads,
        shared_bytes=AMAX_BYTES + columnwise * ROWS * spec.head_dim,
        min_blocks_per_sm=max(1, 512 // spec.threads),
    )
