"""The 128-byte swizzle of shared memory: where the 16-byte chunks of a row lie.

It has one formula, :func:`swizzle_128b`, and everybody who reads or writes such rows means it: TMA, where a box of
:mod:`cuda_kernels.host.tensor_maps` asks for it; wgmma, by :func:`smem_descriptor`; ldmatrix and cp.async, at the
addresses that kernels compute; and stmatrix in ``lowering/fragment_stores.py``.
"""

from __future__ import annotations

from cuda_kernels.device.language import device


@device
def swizzle_128b(row, chunk):
    """Where 16-byte chunk ``chunk`` lies in row ``row`` of 128 bytes under the 128-byte swizzle: its byte offset.

    The chunks of a row are permuted by an exclusive or with the row's number modulo 8, so that the same chunk of eight
    rows is in different banks (PTX ISA, "Tensor swizzling modes"). Rows of eight begin at multiples of 1024 bytes.
    """
    return (chunk ^ (row & 7)) << 4


SMEM_DESC_K_MAJOR_SW128 = (1 << 62) | (64 << 32)
"""A K-major wgmma descriptor without its address: rows of 128 bytes, 128-byte swizzle, 1024 bytes from 8 rows to the
next 8 (PTX ISA, "Matrix descriptor")."""


@device
def smem_descriptor(address):
    """The wgmma descriptor of K-major rows of 128 bytes at ``address`` in shared memory, swizzled.

    ``address`` is a multiple of 1024, or 32-byte steps behind one: those walk along K within the rows.
    """
    return SMEM_DESC_K_MAJOR_SW128 | ((address & 0x3FFFF) >> 4)
