"""Rows in registers, for reductions along rows: how threads share a row, load it and sum over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cuda_kernels.device.codec import element_storer, quad_decoder, quad_loader, quad_registers
from cuda_kernels.device.language import cuda, device, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    bits,
    cached_8_if,
    cached_16_if,
    from_bits,
    load_8_if,
    load_16_if,
    pack_halves,
    shared_load_4,
    shared_load_16,
    shared_store_4,
    shuffle_xor,
    store_8,
    store_16,
)
from cuda_kernels.device.sizes import ITEM_BYTES, DtypeName, ceil_div

THREADS = 256
"""Threads of a block that casts, shared by one to eight rows."""


@dataclass(frozen=True)
class RowLayout:
    """How a row is distributed over registers: thread t has vectors t, t + threads_per_row, ... of the row.

    Attributes:
        threads_per_row: a power of two, at least 32.
        vecs_per_thread: vectors of the row per thread.
        quads_per_vec: quads (four elements) per vector: 2 if all tensors have 16 bits, so that vectors are 16 bytes,
            else 1.
        full: whether a row fills the vectors of all its threads.
    """

    threads_per_row: int
    vecs_per_thread: int
    quads_per_vec: int
    full: bool

    @property
    def in_block(self) -> tuple[int, int, int]:
        """In a block of :data:`THREADS`: the mask of a thread's index in its row, log2 of threads per row, and rows."""
        shift = self.threads_per_row.bit_length() - 1
        return self.threads_per_row - 1, shift, THREADS >> shift

    @property
    def quads_per_thread(self) -> int:
        return self.vecs_per_thread * self.quads_per_vec


def narrowest_row_layout(
    dtypes: tuple[DtypeName, ...], columns: int, threads: tuple[int, ...], elements: int, most: int
) -> RowLayout | None:
    """The layout of a row of ``columns`` elements with the fewest threads; None if it does not fit.

    Args:
        dtypes: dtypes of the tensors whose rows are in registers.
        columns: elements of a row.
        threads: candidates for threads per row, ascending.
        elements: maximum elements per thread.
        most: the same for the largest candidate.
    """
    quads = 2 if all(ITEM_BYTES[dtype] == 2 for dtype in dtypes) else 1
    # Padding after the last column fills a row's last 16 bytes of codes.
    vectors_per_row = ceil_div(columns, 16) * 4 // quads
    for count in threads:
        vectors = ceil_div(vectors_per_row, count)
        if 4 * quads * vectors <= (most if count == threads[-1] else elements):
            return RowLayout(count, vectors, quads, columns == 4 * quads * vectors * count)
    return None


def cast_row_layout(dtype: DtypeName, columns: int) -> RowLayout | None:
    """The layout for blocks of :data:`THREADS`, with 32 registers per thread, or 64 for the longest rows of float32."""
    return narrowest_row_layout((dtype,), columns, (32, 64, 128, 256), 128 // ITEM_BYTES[dtype], 64)


def row_loader(dtype: DtypeName, row_layout: RowLayout) -> Any:
    """A device function ``(address, columns, thread_in_row, registers)`` that loads a thread's share of a row.

    ``address`` is a multiple of 16 bytes, ``columns`` of a vector. Elements outside the row become zeros.
    """
    threads = row_layout.threads_per_row
    vectors = row_layout.vecs_per_thread
    width = 4 * row_layout.quads_per_vec
    itemsize = ITEM_BYTES[dtype]
    registers_of_vector = ITEM_BYTES[dtype] * row_layout.quads_per_vec
    load_vector = load_16_if if registers_of_vector == 4 else load_8_if
    in_bounds = inside_row(row_layout)

    @device
    def load(address, columns, thread_in_row, registers):
        thread_address = address + i64(thread_in_row) * (width * itemsize)
        for vector in range(vectors):
            column = i32((vector * threads + thread_in_row) * width)
            loaded = load_vector(thread_address + vector * threads * width * itemsize, in_bounds(column, columns))
            for register in range(registers_of_vector):
                registers[vector * registers_of_vector + register] = loaded[register]

    return load


def inside_row(row_layout: RowLayout) -> Any:
    """A device function ``(column, columns) -> bool``: whether a thread's column is inside the row."""
    full = row_layout.full

    @device
    def in_bounds(column, columns):
        return full or column < columns

    return in_bounds


def quad_column(row_layout: RowLayout) -> Any:
    """A device function ``(quad, thread_in_row) -> column`` of the first element of a thread's quad."""
    threads = row_layout.threads_per_row
    width = 4 * row_layout.quads_per_vec
    shift = row_layout.quads_per_vec - 1
    mask = row_layout.quads_per_vec - 1

    @device
    def column_of(quad, thread_in_row):
        return i32(((quad >> shift) * threads + thread_in_row) * width + 4 * (quad & mask))

    return column_of


def quad_address(itemsize: int, row_layout: RowLayout) -> Any:
    """A device function ``(begin, quad, thread_in_row) -> address`` of a thread's quad.

    Elements have ``itemsize`` bytes. The address is the thread's first address plus a compile-time constant, which
    loads and stores add for free.
    """
    threads = row_layout.threads_per_row
    width = 4 * row_layout.quads_per_vec
    shift = row_layout.quads_per_vec - 1
    mask = row_layout.quads_per_vec - 1

    @device
    def address_of(begin, quad, thread_in_row):
        return (
            begin
            + i64(thread_in_row) * (width * itemsize)
            + ((quad >> shift) * threads * width + 4 * (quad & mask)) * itemsize
        )

    return address_of


def row_registers(dtype: DtypeName, row_layout: RowLayout) -> int:
    """32-bit registers of a thread for its share of a row."""
    return quad_registers(dtype) * row_layout.quads_per_vec * row_layout.vecs_per_thread


def quad_reader(dtype: DtypeName, aligned: bool) -> Any:
    """A device function ``(row_address, column, columns) -> four float32`` of that row; zeros beyond columns."""
    load = quad_loader(dtype, aligned)
    decode = quad_decoder(dtype)
    registers_of_quad = quad_registers(dtype)
    itemsize = ITEM_BYTES[dtype]

    @device
    def quad(row_address, column, columns):
        registers = cuda.local.array(registers_of_quad, u32)
        loaded = load(row_address + i64(column) * itemsize, column, columns, True)
        for register in range(registers_of_quad):
            registers[register] = loaded[register]
        return decode(registers, 0)

    return quad


def parameter_quad(dtype: DtypeName) -> Any:
    """A device function ``(address, in_bounds) -> four float32`` of a vector that every row reads.

    It is cached in L1. Zeros unless ``in_bounds``.
    """
    registers_of_quad = quad_registers(dtype)
    load = cached_16_if if registers_of_quad == 4 else cached_8_if
    decode = quad_decoder(dtype)

    @device
    def quad(address, in_bounds):
        registers = cuda.local.array(registers_of_quad, u32)
        loaded = load(address, in_bounds)
        for register in range(registers_of_quad):
            registers[register] = loaded[register]
        return decode(registers, 0)

    return quad


def quad_storer(dtype: DtypeName, aligned: bool) -> Any:
    """A device function ``(address, column, columns, a, b, c, d)`` that rounds and stores four elements of a row.

    ``aligned``: the address is a multiple of a quad, so that all four elements are either inside or outside.
    """
    pack = pack_halves.get(dtype)
    itemsize = ITEM_BYTES[dtype]
    store_one = element_storer(dtype)

    @device
    def store_halves(address, column, columns, a, b, c, d):
        if column < columns:
            store_8(address, pack(a, b), pack(c, d))

    @device
    def store_floats(address, column, columns, a, b, c, d):
        if column < columns:
            store_16(address, bits(a), bits(b), bits(c), bits(d))

    @device
    def store_each(address, column, columns, a, b, c, d):
        if column < columns:
            store_one(address, a)
        if column + 1 < columns:
            store_one(address + itemsize, b)
        if column + 2 < columns:
            store_one(address + 2 * itemsize, c)
        if column + 3 < columns:
            store_one(address + 3 * itemsize, d)

    return store_each if not aligned else store_halves if pack else store_floats


def row_sum(threads: int) -> Any:
    """A device function ``(value, shared, thread) -> sum`` over the ``threads`` threads of a row, in a fixed order.

    ``shared``: four bytes per warp of the block. They can be reused after the next call with other shared memory.
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
            sums_address = i32(shared + i32(warp & first_warp) * 4)
            if warps >= 4:  # 16 bytes at a time
                for four in range(warps // 4):
                    a, b, c, d = shared_load_16(i32(sums_address + 16 * four))
                    value += from_bits(a)
                    value += from_bits(b)
                    value += from_bits(c)
                    value += from_bits(d)
            else:
                for other_warp in range(warps):
                    value += from_bits(shared_load_4(i32(sums_address + 4 * other_warp)))
        return value

    return total
