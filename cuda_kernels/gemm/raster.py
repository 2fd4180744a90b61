"""The order in which blocks compute the tiles of a result."""

from __future__ import annotations

from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import quotient, remainder

_BAND = 8
"""Rows of tiles that are walked through together: blocks that run at a time share their operands in L2."""


@device
def corner(tile, m_tiles, n_tiles):
    """Where the tile of that number is, of ``m_tiles`` downwards and ``n_tiles`` across."""
    band = quotient(tile, _BAND * n_tiles)
    height = min(_BAND, m_tiles - band * _BAND)
    inside = tile - band * _BAND * n_tiles
    return band * _BAND + remainder(inside, height), quotient(inside, height)
