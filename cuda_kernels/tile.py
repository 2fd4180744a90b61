"""What kernels that cast tiles of 128 × 128 share: how threads hold a tile, store it, and store it transposed.

A block has 8 warps of 16 rows; a lane holds four neighbouring columns of each: 16 loads are in flight at once, and
four rows of four bytes turn into four columns inside a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import types

from cuda_kernels.codec import ITEM_BYTES, device, largest_of, quad_decoder, quad_loader, quad_words
from cuda_kernels.ptx import (
    i32,
    i64,
    permute_bytes,
    quotient,
    shared_load_16,
    shared_store_4,
    shared_store_16,
    store_4,
    store_16,
    u32,
    unsigned_max,
    warp_max,
)

TILE = 128
THREADS = 256
WARPS = THREADS // 32
WARP_ROWS = TILE // WARPS
"""Rows of a tile that one warp holds."""
TRANSPOSED_BYTES = TILE * TILE


def tiles(rows: int, columns: int) -> int:
    return -(-rows // TILE) * -(-columns // TILE)


@device
def position(tile, columns):
    """Row and column of tile number ``tile``, row by row; in elements."""
    across = (columns + i32(TILE - 1)) >> i32(7)
    down = quotient(tile, across)
    return down << i32(7), (tile - down * across) << i32(7)


@dataclass(frozen=True, eq=False)
class Source:
    """Where the values of a tile come from: a tensor as it is, or what is computed from tensors on the way.

    Attributes:
        name: tells it from every other source.
        words: how many int64 a kernel takes for it: addresses, pitches.
        registers: 32-bit registers of a thread that hold its 16 rows of four elements.
        load: device function ``(words, rows, columns, row, column, registers)`` that fills them; elements outside the
            tensor become zeros.
        decode: device function ``(registers, step) -> four float32`` of row ``row + step``.
        blocks: how many blocks shall fit into the registers of a multiprocessor.
    """

    name: str
    words: int
    registers: int
    load: Any
    decode: Any
    blocks: int

    @property
    def words_type(self) -> Any:
        """The type of a kernel's first parameter."""
        return types.UniTuple(i64, self.words)


@cache
def tensor_source(dtype: str, aligned: bool) -> Source:
    """A tensor of ``dtype``: its address and the pitch of its rows in elements.

    ``aligned``: address, pitch and columns are multiples of four elements.
    """
    item, quad, load_quad = ITEM_BYTES[dtype], quad_words(dtype), quad_loader(dtype, aligned)
    decode_quad = quad_decoder(dtype)

    @device
    def load(words, rows, columns, row, column, registers):
        address = words[0] + (i64(row) * words[1] + i64(column)) * i64(item)
        for step in range(WARP_ROWS):
            loaded = load_quad(address + step * words[1] * item, column, columns, row + step < rows)
            for word in range(quad):
                registers[step * quad + word] = loaded[word]

    @device
    def decode(registers, step):
        return decode_quad(registers, step * quad)

    return Source(f"{dtype}, {aligned=}", 2, WARP_ROWS * quad, load, decode, (3 if quad == 2 else 2) - int(not aligned))


@device
def block_max(value, shared, thread):
    """The maximum of all threads' ``value``, for every thread; ``shared``: 32 bytes of their own."""
    value = warp_max(value)
    if thread & 31 == 0:
        shared_store_4(shared + (thread >> 5) * 4, value)
    cuda.syncthreads()
    low, high = shared_load_16(shared), shared_load_16(shared + 16)
    return unsigned_max(largest_of(low[0], low[1], low[2], low[3]), largest_of(high[0], high[1], high[2], high[3]))


@device
def store_row(out, pitch, row, rows, column, word):
    """Four codes of a row. ``pitch`` is a multiple of 16: codes beyond the last column fill it, with zeros."""
    if row < rows and column < pitch:
        store_4(out + i64(row) * pitch + i64(column), word)


@device
def transpose_quads(words):
    """16 rows of four codes to four columns of 16 codes, in place: columns become four registers each."""
    turned = cuda.local.array(16, u32)
    for group in range(4):
        a, b, c, d = words[4 * group], words[4 * group + 1], words[4 * group + 2], words[4 * group + 3]
        ab, cd = permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140)
        turned[group] = permute_bytes(ab, cd, 0x5410)
        turned[4 + group] = permute_bytes(ab, cd, 0x7632)
        ab, cd = permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362)
        turned[8 + group] = permute_bytes(ab, cd, 0x5410)
        turned[12 + group] = permute_bytes(ab, cd, 0x7632)
    for index in range(16):
        words[index] = turned[index]


@device
def store_transposed(words, shared, thread, out, pitch, first_row, first_column, columns):
    """The tile's codes as columns; through shared memory, so that a column's 128 codes leave together.

    ``pitch`` is a multiple of 16, in codes: codes beyond the last row fill it, with zeros.
    """
    transpose_quads(words)
    lane, warp = thread & 31, thread >> 5
    for step in range(4):
        # Column 4 lane + step, rows 16 warp ...; the 16-byte places of a column are permuted against bank conflicts.
        place = (4 * lane + step) * TILE + ((warp ^ (lane & 7)) << 4)
        shared_store_16(shared + place, words[4 * step], words[4 * step + 1], words[4 * step + 2], words[4 * step + 3])
    cuda.syncthreads()
    for step in range(4):
        chunk = thread + THREADS * step
        column, part = chunk >> 3, chunk & 7
        codes = shared_load_16(shared + column * TILE + ((part ^ ((column >> 2) & 7)) << 4))
        if first_column + column < columns and first_row + 16 * part < pitch:
            address = out + i64(first_column + column) * pitch + i64(first_row + 16 * part)
            store_16(address, codes[0], codes[1], codes[2], codes[3])
