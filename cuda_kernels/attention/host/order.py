"""The order of attention's blocks: which of them run at the same time and share operands in the L2 cache."""

from __future__ import annotations

import torch

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host.launch import Grid, l2_bytes, multiprocessors

_WAVES = 2


def grid_of_tiles(heads: int, tiles: int, bytes_of_head: float, device: torch.device) -> Grid:
    """The grid of :func:`cuda_kernels.attention.tiles.tile_of`: all tiles of some heads, then those of the next ones.

    The blocks of a head read the same operands in their loops. These are read from global memory once if those of all
    blocks that run together fit into the L2 cache; half of it is assumed to be available. In the table, tiles with less
    work come later and even out the ends of the blocks, so that at least two waves of blocks are processed together.

    Args:
        heads: the number of heads.
        tiles: the number of tiles of a head.
        bytes_of_head: bytes of the operands that all blocks of a head read.
        device: the device.
    """
    fitting = l2_bytes(device) / 2 / max(bytes_of_head, 1)
    of_waves = ceil_div(_WAVES * multiprocessors(device), max(tiles, 1))
    even = [each for each in range(1, heads + 1) if heads % each == 0 and each >= of_waves] or [heads]
    at_once = max((each for each in even if each <= fitting), default=even[0])
    return at_once, tiles, heads // at_once
