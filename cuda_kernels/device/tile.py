"""Tiles of 128 × 128 elements: how the threads of a cast load a tile, store it, and store it transposed.

A block has 8 warps of 16 rows. A lane holds a quad (four consecutive columns) of each row, so that it can transpose
four rows of four bytes by itself. If nothing is transposed, it may instead hold eight columns of every other row, 16
bytes of a 16-bit tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cuda_kernels.device.codec import (
    ITEM_BYTES,
    DtypeName,
    Maxima,
    decoded_maxima,
    largest_of,
    load_vector_if,
    packed_maxima,
    quad_decoder,
    quad_loader,
    quad_registers,
    vector_loader_in_bounds,
)
from cuda_kernels.device.language import UniTuple, cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import (
    load_4,
    permute_bytes,
    quotient,
    shared_load_16,
    shared_store_4,
    shared_store_16,
    store_4,
    store_8,
    store_16,
    unsigned_max,
    warp_max,
)
from cuda_kernels.device.sizes import ceil_div

TILE = 128
THREADS = 256
WARPS = THREADS // 32
WARP_ROWS = TILE // WARPS
"""Rows of a tile per warp."""
TRANSPOSED_BYTES = TILE * TILE


def num_tiles(rows: int, columns: int) -> int:
    """The number of tiles that cover ``[rows, columns]``."""
    return ceil_div(rows, TILE) * ceil_div(columns, TILE)


@device
def position(tile_idx, rows, columns):
    """Row and column of tile ``tile_idx`` (row-major), and whether the tile is fully inside ``[rows, columns]``."""
    across = i32(i32(columns + TILE - 1) >> 7)
    down = quotient(tile_idx, across)
    tile_row, tile_col = i32(down << 7), i32(i32(tile_idx - i32(down * across)) << 7)
    return tile_row, tile_col, rows - tile_row >= TILE and columns - tile_col >= TILE


@device
def _only(address):
    return address


@device
def _only_words(address, n):
    return address


@device
def _one_of_two(addresses):
    return addresses[1] if cuda.blockIdx.x & 1 else addresses[0]


@device
def _words_of_two(address, n):
    return address + i64(n) * 4 if address != 0 and cuda.blockIdx.x & 1 else address


@device
def _of_expert(address_and_step):
    return address_and_step[0] + i64(cuda.blockIdx.z) * address_and_step[1]


@device
def _words_of_expert(address, n):
    return address + i64(cuda.blockIdx.z) * (i64(n) * 4)


OF_TWO = _one_of_two, _words_of_two
""":attr:`TileLoader.own` of two tensors."""


@dataclass(frozen=True, eq=False)
class TileLoader:
    """How a cast loads a tile: from a tensor, or computed from tensors (prologue fusion).

    Attributes:
        name: unique among all loaders.
        num_args: number of int64 kernel parameters of the loader: addresses, strides.
        num_registers: 32-bit registers of a thread for its 16 quads of four consecutive columns.
        load: device function ``(args, rows, columns, first_row, column, full_tile, registers)`` that fills them; the
            thread's first element is at ``first_row`` and ``column``. Elements outside the tensor become zeros; with
            ``full_tile`` there are none.
        decode: device function ``(registers, quad_index) -> four float32`` of a quad.
        maxima: how the largest magnitudes of quads are tracked.
        min_blocks_per_sm: blocks of a cast that must fit on a multiprocessor.
        vector: consecutive columns of a lane: 4 of each of a warp's rows, or 8 of every other row.
        tensors: 1, or 2 if a launch casts two tensors of one shape: even blocks process the first one, odd blocks the
            same tile of the second one, so that what both are computed from is in the cache.
        addresses: int64 kernel parameters for an address: 1, one for each of two tensors, or 2 for experts.
        own: device functions that select what belongs to the block's tensor. The first one maps a parameter of
            :attr:`address_type` to an address, the second one the address of words ``[tensors, n]``, and n, to the
            address of its n words; of two tensors, 0 stays 0.
    """

    name: str
    num_args: int
    num_registers: int
    load: Any
    decode: Any
    maxima: Maxima
    min_blocks_per_sm: int
    vector: int = 4
    tensors: int = 1
    addresses: int = 1
    own: tuple[Any, Any] = (_only, _only_words)

    @property
    def args_type(self) -> Any:
        """The type of a kernel's first parameter."""
        return UniTuple(i64, self.num_args)

    @property
    def address_type(self) -> Any:
        """The type of a kernel's parameter for :attr:`addresses`."""
        return i64 if self.addresses == 1 else UniTuple(i64, 2)

    def load_tile(self) -> Any:
        """A device function ``(args, tile_idx, rows, columns, registers)`` that loads a thread's part of a tile.

        It returns ``tile_row, tile_col, first_row, column, full_tile``. ``tile_idx``: index of the tile in a tensor
        ``[rows, columns]``, in row-major order, counted once for each of :attr:`tensors`. ``tile_row``, ``tile_col``:
        the tile's first element; ``first_row``, ``column``: the thread's first element; ``full_tile``: whether the tile
        is fully inside.
        """
        load_at = self.load_tile_at()
        origin_of = thread_origin(self.vector)

        @device
        def load_tile(args, tile_idx, rows, columns, registers):
            return load_at(args, tile_idx, origin_of(cuda.threadIdx.x), rows, columns, registers)

        return load_tile

    def load_tile_at(self) -> Any:
        """:meth:`load_tile` with the :func:`thread_origin` after ``tile_idx``, for blocks of several tiles."""
        load, tensors = self.load, self.tensors

        @device
        def load_tile_at(args, tile_idx, origin, rows, columns, registers):
            tile_row, tile_col, full_tile = position(i32(tile_idx >> (tensors - 1)), rows, columns)
            first_row = i32(tile_row + origin[0])
            column = i32(tile_col + origin[1])
            load(args, rows, columns, first_row, column, full_tile, registers)
            return tile_row, tile_col, first_row, column, full_tile

        return load_tile_at


def thread_origin(vector: int) -> Any:
    """A device function ``thread -> row, column`` of the first element of a tile that belongs to a thread."""
    if vector == 4:
        return device(lambda thread: (i32(WARP_ROWS * (thread >> 5)), i32(4 * (thread & 31))))
    return device(lambda thread: (i32(WARP_ROWS * (thread >> 5) + ((thread >> 4) & 1)), i32(8 * (thread & 15))))


def row_of_quad(vector: int) -> Any:
    """A device function ``(lane, quad_index) -> row`` of a quad, within its warp's rows."""
    if vector == 4:
        return device(lambda lane, quad_index: i32(quad_index))
    return device(lambda lane, quad_index: i32(2 * (quad_index >> 1) + (lane >> 4)))


@cache
def tensor_loader(dtype: DtypeName, vector: int) -> TileLoader:
    """Loads from a tensor of ``dtype``; arguments: its address, and the stride of its rows in elements.

    ``vector``: address, stride and columns are multiples of this many elements. With 1 or 4 a lane holds quads, with 8
    it holds 16 bytes, which transposing casts do not support.
    """
    itemsize = ITEM_BYTES[dtype]
    registers_of_quad = quad_registers(dtype)
    decode_quad = quad_decoder(dtype)
    lanes_columns = max(4, vector)
    registers_of_load = registers_of_quad * lanes_columns // 4
    row_step = lanes_columns // 4
    load_inside = load_vector_if(dtype, lanes_columns)
    load_some = vector_loader_in_bounds(dtype, 8) if vector == 8 else quad_loader(dtype, vector == 4)

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        x, row_stride = args[0], args[1]  # a loader that wraps this one may have more arguments
        # The address is advanced by additions, since a 64-bit product takes four instructions.
        address = x + (i64(first_row) * row_stride + i64(column)) * itemsize
        stride = row_stride * (itemsize * row_step)
        if full_tile and vector > 1:
            for step in range(WARP_ROWS // row_step):
                loaded = load_inside(address, True)
                for register in range(registers_of_load):
                    registers[step * registers_of_load + register] = loaded[register]
                address += stride
        else:
            rows_left = i32(rows - first_row)
            for step in range(WARP_ROWS // row_step):
                loaded = load_some(address, column, columns, i32(step * row_step) < rows_left)
                for register in range(registers_of_load):
                    registers[step * registers_of_load + register] = loaded[register]
                address += stride

    @device
    def decode(registers, quad_index):
        return decode_quad(registers, quad_index * registers_of_quad)

    maxima = decoded_maxima() if dtype == "float32" else packed_maxima(dtype)
    blocks = (3 if registers_of_quad == 2 else 2) - int(vector == 1)
    return TileLoader(
        f"{dtype}, {vector=}", 2, WARP_ROWS * registers_of_quad, load, decode, maxima, blocks, lanes_columns
    )


@cache
def experts_loader(loader: TileLoader, one_scale: bool) -> TileLoader:
    """``loader`` of experts ``[rows, columns]``, one after the other; a block's expert is its z.

    A kernel's parameter for an address is the first expert's, and the bytes from one expert to the next. With
    ``one_scale``, words are those of all experts.
    """
    load_rows = loader.load

    @device
    def load(args, rows, columns, first_row, column, full_tile, registers):
        before = i32(i32(cuda.blockIdx.z) * rows)
        load_rows(args, i32(before + rows), columns, i32(before + first_row), column, full_tile, registers)

    own = _of_expert, _only_words if one_scale else _words_of_expert
    return replace(loader, name=f"experts{' of one scale' * one_scale}, {loader.name}", load=load, addresses=2, own=own)


@device
def block_max(value, shared, thread):
    """The maximum of all threads' ``value``, returned to every thread; ``shared``: 32 bytes for it alone."""
    value = warp_max(value)
    if thread & 31 == 0:
        shared_store_4(shared + (thread >> 5) * 4, value)
    cuda.syncthreads()
    low, high = shared_load_16(shared), shared_load_16(shared + 16)
    return unsigned_max(largest_of(low[0], low[1], low[2], low[3]), largest_of(high[0], high[1], high[2], high[3]))


@device
def reduce_block_amax(block_amax, num_block_amax, shared, thread):
    """The largest bits in ``block_amax [num_block_amax]``, returned to every thread; 0 if its address is 0.

    ``shared``: see :func:`block_max`.
    """
    largest = u32(0)
    index = thread
    while block_amax != 0 and index < num_block_amax:
        largest = unsigned_max(largest, load_4(block_amax + i64(index) * 4))
        index += THREADS
    return block_max(largest, shared, thread)


def row_storer(vector: int) -> Any:
    """A device function ``(packed, out, stride, first_row, rows, column, full_tile)`` that stores a thread's 16 quads.

    They are codes. ``stride`` is a multiple of 16; the columns up to it are filled with zeros.
    """
    row_step = vector // 4

    @device
    def store_at(address, packed, step):
        if row_step == 2:
            store_8(address, packed[2 * step], packed[2 * step + 1])
        else:
            store_4(address, packed[step])

    @device
    def store_rows(packed, out, stride, first_row, rows, column, full_tile):
        address = out + i64(first_row) * stride + i64(column)
        stride_of_step = stride * row_step
        if full_tile:
            for step in range(WARP_ROWS // row_step):
                store_at(address, packed, step)
                address += stride_of_step
        elif column < stride:
            rows_left = i32(rows - first_row)
            for step in range(WARP_ROWS // row_step):
                if i32(step * row_step) < rows_left:
                    store_at(address, packed, step)
                address += stride_of_step

    return store_rows


@device
def transpose_quads(packed):
    """Transpose 16 rows of four codes to four columns of 16 codes, in place; a column takes four registers."""
    turned = cuda.local.array(16, u32)
    for group in range(4):
        a, b, c, d = packed[4 * group], packed[4 * group + 1], packed[4 * group + 2], packed[4 * group + 3]
        ab, cd = permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140)
        turned[group] = permute_bytes(ab, cd, 0x5410)
        turned[4 + group] = permute_bytes(ab, cd, 0x7632)
        ab, cd = permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362)
        turned[8 + group] = permute_bytes(ab, cd, 0x5410)
        turned[12 + group] = permute_bytes(ab, cd, 0x7632)
    for index in range(16):
        packed[index] = turned[index]


@device
def store_transposed(packed, shared, thread, out, stride, tile_row, tile_col, columns):
    """Store the tile's codes transposed, through shared memory, so that a column's 128 codes are stored together.

    ``stride`` is a multiple of 16, in codes; the rows up to it are filled with zeros. The shared memory has its own
    swizzle, private to this function.
    """
    transpose_quads(packed)
    lane, warp = i32(thread & 31), i32(thread >> 5)
    # Column 4 lane + step, rows 16 warp ...; to avoid bank conflicts, the index of a column's 16-byte chunk is XORed
    # with the lane, in the same way for four consecutive columns.
    store_address = i32(shared + (lane << 9) + ((warp ^ (lane & 7)) << 4))
    for step in range(4):
        column_address = i32(store_address + step * TILE)
        shared_store_16(
            column_address, packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]
        )
    cuda.syncthreads()
    col_in_tile, part = i32(thread >> 3), i32(thread & 7)
    load_address = i32(shared + (col_in_tile << 7) + ((part ^ (warp & 7)) << 4))
    address = out + i64(tile_col + col_in_tile) * stride + i64(tile_row + 16 * part)
    cols_left = i32(columns - tile_col) - col_in_tile if tile_row + 16 * part < stride else i32(0)
    for step in range(4):
        codes = shared_load_16(i32(load_address + step * (TRANSPOSED_BYTES // 4)))
        if i32(step * (TILE // 4)) < i32(cols_left):
            store_16(address, codes[0], codes[1], codes[2], codes[3])
        address += stride * (TILE // 4)
