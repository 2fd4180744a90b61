"""Rows held in the registers of their threads, for what is summed along them: how they are spread, loaded and summed.

A row's threads hold vectors of four or eight neighbouring elements, every ``threads``-th vector one thread's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import cuda

from cuda_kernels.codec import ITEM_BYTES, device, quad_decoder, quad_words
from cuda_kernels.ptx import (
    asm,
    bits,
    f32,
    from_bits,
    i32,
    i64,
    load_8_if,
    load_16_if,
    shared_load_4,
    shared_store_4,
    shuffle_xor,
    store_2,
    store_4,
    store_8,
    store_16,
    u32,
    words,
)

THREADS = 256
"""Threads of a block that casts; one to eight rows share it."""

_KEPT = "{ .reg .pred p; setp.ne.s32 p, %s, 0; @p ld.global.nc.%s; %s }"
_kept_8_if = asm(_KEPT % ("$3", "v2.b32 {$0, $1}, [$2]", "@!p mov.b32 $0, 0; @!p mov.b32 $1, 0;"), words(2), i64, i32)
_kept_16_if = asm(
    _KEPT
    % (
        "$5",
        "v4.b32 {$0, $1, $2, $3}, [$4]",
        "@!p mov.b32 $0, 0; @!p mov.b32 $1, 0; @!p mov.b32 $2, 0; @!p mov.b32 $3, 0;",
    ),
    words(4), i64, i32,
)  # fmt: skip

_pair = {
    "bfloat16": asm("cvt.rn.bf16x2.f32 $0, $2, $1;", u32, f32, f32, pure=True),
    "float16": asm("cvt.rn.f16x2.f32 $0, $2, $1;", u32, f32, f32, pure=True),
}
"""Two float32, rounded to nearest even; the first in the low half. By the name of the dtype."""


@dataclass(frozen=True)
class Spread:
    """How a row lies in registers.

    Attributes:
        threads: of one row; a power of two, at least 32.
        vectors: of one thread.
        quads: of a vector: 2 where every tensor has 16 bits, so that vectors are 16 bytes, else 1.
    """

    threads: int
    vectors: int
    quads: int


def spread(dtypes: tuple[str, ...], columns: int, threads: tuple[int, ...], vectors: int) -> Spread | None:
    """The narrowest spread of a row of ``columns`` elements, or None where it does not fit.

    Args:
        dtypes: of the tensors whose rows are held.
        threads: what a row may have, ascending.
        vectors: how many one thread may hold; twice as many with the most threads.
    """
    quads = 2 if all(ITEM_BYTES[dtype] == 2 for dtype in dtypes) else 1
    # Codes beyond the last column fill a row's last 16 bytes.
    needed = -(-columns // 16) * 16 // (4 * quads)
    for count in threads:
        if needed <= count * vectors:
            return Spread(count, -(-needed // count), quads)
    return Spread(threads[-1], -(-needed // threads[-1]), quads) if needed <= threads[-1] * vectors * 2 else None


def row_loader(dtype: str, spread: Spread) -> Any:
    """A device function ``(address, columns, lane, inside, registers)`` that loads a row's share of one thread.

    ``address`` is a multiple of 16 bytes, ``columns`` of a vector. What lies outside becomes zeros.
    """
    threads, vectors, width = spread.threads, spread.vectors, 4 * spread.quads
    item, held = ITEM_BYTES[dtype], ITEM_BYTES[dtype] * spread.quads
    load_vector = load_16_if if held == 4 else load_8_if

    @device
    def load(address, columns, lane, inside, registers):
        for vector in range(vectors):
            column = (vector * threads + lane) * width
            loaded = load_vector(address + column * item, inside and column < columns)
            for word in range(held):
                registers[vector * held + word] = loaded[word]

    return load


def registers_of(dtype: str, spread: Spread) -> int:
    """32-bit registers of a thread that hold its share of a row."""
    return quad_words(dtype) * spread.quads * spread.vectors


def parameter_quad(dtype: str) -> Any:
    """A device function ``(address, column, columns) -> four float32`` of a vector that every row reads.

    It stays in the multiprocessor's first cache. Zeros beyond ``columns``, which is a multiple of four.
    """
    item, held = ITEM_BYTES[dtype], quad_words(dtype)
    load, decode = _kept_16_if if held == 4 else _kept_8_if, quad_decoder(dtype)

    @device
    def quad(address, column, columns):
        registers = cuda.local.array(held, u32)
        loaded = load(address + i64(column) * item, column < columns)
        for word in range(held):
            registers[word] = loaded[word]
        return decode(registers, 0)

    return quad


def quad_storer(dtype: str, aligned: bool) -> Any:
    """A device function ``(address, column, columns, a, b, c, d)`` that rounds and stores four elements of a row."""
    item = ITEM_BYTES[dtype]
    pair = _pair.get(dtype, _pair["bfloat16"])
    whole = aligned and item == 2

    @device
    def encode(value):
        return bits(value) if item == 4 else pair(value, value)

    @device
    def store_one(address, column, columns, value):
        if column < columns:
            if item == 4:
                store_4(address, encode(value))
            else:
                store_2(address, encode(value))

    @device
    def store(address, column, columns, a, b, c, d):
        if whole:
            if column < columns:
                store_8(address, pair(a, b), pair(c, d))
        elif aligned:
            if column < columns:
                store_16(address, bits(a), bits(b), bits(c), bits(d))
        else:
            store_one(address, column, columns, a)
            store_one(address + item, column + 1, columns, b)
            store_one(address + 2 * item, column + 2, columns, c)
            store_one(address + 3 * item, column + 3, columns, d)

    return store


def row_sum(threads: int) -> Any:
    """A device function ``(value, shared, thread) -> sum`` over the ``threads`` threads of a row, in a fixed order.

    ``shared``: four bytes for each warp of the block. They may be used again after the next call with others.
    """
    warps = threads >> 5
    first_warp = -warps

    @device
    def total(value, shared, thread):
        value += from_bits(shuffle_xor(bits(value), 16))
        value += from_bits(shuffle_xor(bits(value), 8))
        value += from_bits(shuffle_xor(bits(value), 4))
        value += from_bits(shuffle_xor(bits(value), 2))
        value += from_bits(shuffle_xor(bits(value), 1))
        if warps > 1:
            warp = thread >> 5
            if thread & 31 == 0:
                shared_store_4(shared + warp * 4, bits(value))
            cuda.syncthreads()
            value = f32(0)
            for other in range(warps):
                value += from_bits(shared_load_4(shared + ((warp & i32(first_warp)) + other) * 4))
        return value

    return total
