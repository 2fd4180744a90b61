"""The 128-byte swizzle of shared memory: where the 16-byte chunks of rows of 128 bytes lie, and how to walk along rows.

It has one formula, :func:`swizzle_128b`, and nobody else computes an address by it. cp.async and plain loads call that;
ldmatrix takes :func:`ldmatrix_a`, :func:`ldmatrix_b` and, along K, :func:`along_row`; stmatrix is in
:func:`make_swizzled_store`; wgmma takes :func:`smem_descriptor` and :func:`advance_descriptor`. TMA swizzles by itself
where a box of :mod:`cuda_kernels.host.tensor_maps` asks for it. What casts transpose (``device/tile.py``,
``attention/casts/transpose.py``) lies in orders of its own, which no instruction has to know.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cuda_kernels.device.fragments import store_fragment_shared
from cuda_kernels.device.language import device, i32

if TYPE_CHECKING:
    from cuda_kernels.device.codec import DtypeName  # which reads shared memory, and so is above this module

ROW_BYTES = 128
"""Bytes of a row: as many as the 128-byte swizzle permutes."""
ATOM_BYTES = 8 * ROW_BYTES
"""Bytes of eight rows, after which the swizzle repeats. Shared memory begins at a multiple of it, and so do tiles, of
which the swizzle in hardware knows addresses only. Rows that are a multiple of eight apart are permuted alike."""


@device
def swizzle_128b(row, chunk):
    """Where 16-byte chunk ``chunk`` of row ``row`` lies under the 128-byte swizzle: bytes from the first row on.

    The chunks of a row are permuted by an exclusive or with the row's number modulo 8, so that the same chunk of eight
    rows is in different banks (PTX ISA, "Tensor swizzling modes"). The first row begins at a multiple of
    :data:`ATOM_BYTES`, or is a multiple of eight rows behind one that does.
    """
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)


@device
def along_row(address, num_bytes):
    """The address of the chunk ``num_bytes`` further along the row, i.e. along K, of the chunk at ``address``.

    ``num_bytes``: a multiple of 16 whose bits the unswizzled place of the first chunk in its row has not: 32, 64 and 96
    from chunk 0 or 1, or 32 from chunk 4 or 5. Then the sum of both is an exclusive or, which may come before or after
    that of the swizzle; and since rows begin at multiples of 128, it may be that of the address.
    """
    return address ^ num_bytes


@device
def ldmatrix_a(lane):
    """Where ``lane``'s row for ``ldmatrix.x4`` lies, from the first of 16 rows on: rows 0 to 15, their first 32 bytes.

    The four matrices are rows 0 to 7 and 8 to 15 of bytes 0 to 15, then of bytes 16 to 31: an operand A of mma.
    """
    return swizzle_128b(lane & 15, lane >> 4)


@device
def ldmatrix_b(lane):
    """As :func:`ldmatrix_a`, with bytes 0 to 15 and 16 to 31 of rows 0 to 7, then of 8 to 15: operands B of two mma."""
    return swizzle_128b((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)


@cache
def make_swizzled_store(num_registers: int, dtype: DtypeName) -> Any:
    """A device function ``(acc, shared, lane)``: a warp stores its 16 rows, 128 bytes of each or fewer, in ``dtype``.

    ``acc``: ``num_registers`` of float32; ``shared``: where the first row begins, as :func:`swizzle_128b` needs it.
    """
    wide = dtype == "float32"
    store = store_fragment_shared(num_registers, dtype)
    addresses_along_row = _addresses_along_row(num_registers // (4 if wide else 8))

    @device
    def store_rows(acc, shared, lane):
        if wide:  # two elements, half a chunk, of a row of the lane's own, and of the row eight below
            address = shared + swizzle_128b(lane >> 2, lane >> 1 & 1) + (lane & 1) * 8
        else:  # stmatrix wants the addresses that ldmatrix wants
            address = shared + ldmatrix_a(lane)
        store(acc, addresses_along_row(i32(address)))

    return store_rows


@cache
def _addresses_along_row(count: int, start: int = 0) -> Any:
    """A device function ``address -> addresses``: ``count - start`` of them, each 32 bytes further along the row."""

    @device
    def first_address(address):
        return (i32(along_row(address, 32 * start)),)

    if start == count - 1:
        return first_address
    other_addresses = _addresses_along_row(count, start + 1)

    @device
    def addresses(address):
        return first_address(address) + other_addresses(address)

    return addresses


SMEM_DESC_K_MAJOR_SW128 = (1 << 62) | (ATOM_BYTES >> 4 << 32)
"""A K-major wgmma descriptor without its address: 128-byte swizzle, and from eight rows to the next (PTX ISA, "Matrix
descriptor")."""


@device
def smem_descriptor(address):
    """The wgmma descriptor of K-major rows of 128 bytes at ``address`` in shared memory, swizzled.

    ``address`` is a multiple of :data:`ATOM_BYTES`, or 32-byte steps along K behind one: wgmma swizzles the addresses
    that it computes, so that steps add up, other than in :func:`along_row`.
    """
    return SMEM_DESC_K_MAJOR_SW128 | ((address & 0x3FFFF) >> 4)


@device
def advance_descriptor(descriptor, num_bytes):
    """The descriptor of what lies ``num_bytes`` further: steps of 32 along K, or multiples of :data:`ATOM_BYTES`."""
    return descriptor + (num_bytes >> 4)
