"""The order in which blocks compute the tiles of a result."""

from __future__ import annotations

from cuda_kernels.device.language import device
from cuda_kernels.device.ptx import quotient, remainder

_BAND = 8
"""Rows of tiles that are traversed together, so that concurrent blocks share operands in L2."""


@device
def tile_coord(tile_idx, m_tiles, n_tiles):
    """Row and column, in tiles, of tile ``tile_idx`` of ``m_tiles`` by ``n_tiles``."""
    band = quotient(tile_idx, _BAND * n_tiles)
    height = min(_BAND, m_tiles - band * _BAND)
    inside = tile_idx - band * _BAND * n_tiles
    return band * _BAND + remainder(inside, height), quotient(inside, height)
