"""The 128-byte swizzle of shared memory: addresses of the 16-byte chunks of rows of 128 bytes, and steps along rows.

All addresses are computed by one formula, :func:`swizzle_128b`. cp.async and plain loads call it; ldmatrix uses
:func:`ldmatrix_a`, :func:`ldmatrix_b` and, along K, :func:`along_row`; stmatrix is in :func:`make_swizzled_store`;
wgmma uses :func:`smem_descriptor` and :func:`advance_descriptor`. TMA swizzles in hardware if a box of
:mod:`cuda_kernels.host.tensor_maps` requests it. Transposing casts (``device/tile.py``,
``attention/casts/cast.py``) use other orders, which are private to them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import store_fragment_shared
from cuda_kernels.device.language import device, i32
from cuda_kernels.device.sizes import DtypeName

ROW_BYTES = 128
"""Bytes of a row: the span that the 128-byte swizzle permutes."""
ATOM_BYTES = 8 * ROW_BYTES
"""Bytes of eight rows, the period of the swizzle. Shared memory and tiles are aligned to it, because the hardware
swizzles by address only. Rows whose distance is a multiple of eight are permuted alike."""


@device
def swizzle_128b(row, chunk):
    """Byte offset of 16-byte chunk ``chunk`` of row ``row`` under the 128-byte swizzle, from the first row.

    A chunk's index is XORed with the row's number modulo 8, so that the same chunk of eight rows is in different banks
    (PTX ISA, "Tensor swizzling modes"). The first row must be aligned to :data:`ATOM_BYTES`, or be a multiple of eight
    rows after one that is.
    """
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)


@device
def along_row(address, num_bytes):
    """The address of the chunk ``num_bytes`` further along the row, that is along K.

    ``num_bytes`` must be a multiple of 16 whose bits are 0 in the first chunk's unswizzled offset: 32, 64 or 96 from
    chunk 0 or 1, or 32 from chunk 4 or 5. Then adding equals XOR, which commutes with the swizzle's XOR. Since rows are
    aligned to 128 bytes, it can be applied to the address.
    """
    return address ^ num_bytes


@device
def ldmatrix_a(lane):
    """Offset of ``lane``'s row address for ``ldmatrix.x4`` of the first 32 bytes of 16 rows, from the first row.

    The four matrices are rows 0 to 7 and 8 to 15 of bytes 0 to 15, then of bytes 16 to 31: an operand A of mma.
    """
    return swizzle_128b(lane & 15, lane >> 4)


@device
def ldmatrix_b(lane):
    """Like :func:`ldmatrix_a`, for bytes 0 to 15 and 16 to 31 of rows 0 to 7, then 8 to 15: operands B of two mma."""
    return swizzle_128b((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)


@cache
def make_swizzled_store(num_registers: int, dtype: DtypeName) -> Any:
    """A device function ``(acc, shared, lane)`` by which a warp stores its 16 rows of 64 or 128 bytes in ``dtype``.

    ``acc``: ``num_registers`` float32; ``shared``: address of the first row, aligned as for :func:`swizzle_128b`.
    """
    wide = dtype == "float32"
    store = store_fragment_shared(num_registers, dtype)
    addresses_along_row = _four_addresses if num_registers // (4 if wide else 8) == 4 else _two_addresses

    @device
    def store_rows(acc, shared, lane):
        if wide:  # two elements, half a chunk, of a row of the lane's own and of the row eight below
            address = shared + swizzle_128b(lane >> 2, lane >> 1 & 1) + (lane & 1) * 8
        else:  # stmatrix takes the same addresses as ldmatrix
            address = shared + ldmatrix_a(lane)
        store(acc, addresses_along_row(i32(address)))

    return store_rows


@device
def _two_addresses(address):
    """``address``, and the one 32 bytes further along the row."""
    return i32(address), i32(along_row(address, 32))


@device
def _four_addresses(address):
    """``address``, and three 32 bytes apart along the row."""
    return _two_addresses(address) + _two_addresses(along_row(address, 64))


SMEM_DESC_K_MAJOR_SW128 = (1 << 62) | (ATOM_BYTES >> 4 << 32)
"""A K-major wgmma descriptor without address: 128-byte swizzle, and the stride between groups of eight rows (PTX ISA,
"Matrix descriptor")."""


@device
def smem_descriptor(address):
    """The wgmma descriptor of swizzled K-major rows of 128 bytes at ``address`` in shared memory.

    ``address`` is a multiple of :data:`ATOM_BYTES`, plus steps of 32 bytes along K. wgmma swizzles the addresses that
    it computes, so steps are added, unlike in :func:`along_row`.
    """
    return SMEM_DESC_K_MAJOR_SW128 | ((address & 0x3FFFF) >> 4)


@device
def advance_descriptor(descriptor, num_bytes):
    """The descriptor ``num_bytes`` further: steps of 32 along K, or multiples of :data:`ATOM_BYTES`."""
    return descriptor + (num_bytes >> 4)
