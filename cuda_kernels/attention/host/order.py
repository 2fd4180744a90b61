"""The order of attention's blocks: which of them run at the same time and share operands in the L2 cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host.launch import Grid, l2_bytes, multiprocessors

_WAVES = 2
_assumed: ContextVar[int | None] = ContextVar("assumed", default=None)


@contextmanager
def assuming_l2_bytes(size: int) -> Iterator[None]:
    """Context manager in which the L2 cache is assumed to have this size, for launches bound inside it."""
    token = _assumed.set(size)
    try:
        yield
    finally:
        _assumed.reset(token)


class Order(NamedTuple):
    """Sections of heads; see :func:`cuda_kernels.attention.tiles.tile_of`.

    Attributes:
        tiles: the number of tiles of a head.
        heads_at_once: the number of heads of a section.
        sections: the number of sections.
    """

    tiles: int
    heads_at_once: int
    sections: int

    def grid(self, blocks_of_tile: int = 1) -> Grid:
        """The grid, with several blocks for each tile of a head."""
        return self.tiles * self.heads_at_once * blocks_of_tile, self.sections, 1


def least_heads(tiles: int, device: torch.device) -> int:
    """The number of heads of a section with two waves of blocks, if a multiprocessor runs one at a time.

    Tiles with less work come later in a section, and even out the ends of the blocks.
    """
    return ceil_div(_WAVES * multiprocessors(device), max(tiles, 1))


def order_of(heads: int, tiles: int, bytes_of_head: float, device: torch.device, group: int = 1) -> Order:
    """The order in which operands are read from global memory least often.

    The blocks of a head read the same operands in their loops. If those of all blocks that run together fit into the L2
    cache, they are read from global memory once; half of the cache is assumed to be available. A section has at least
    two waves of blocks, and as many heads as all others.

    Args:
        heads: the number of heads that have operands of their own.
        tiles: the number of tiles of a head.
        bytes_of_head: the bytes of these operands that blocks which run together read.
        device: the device.
        group: the number of heads of tiles that share the operands of a head.
    """
    l2 = _assumed.get()
    fitting = (l2_bytes(device) if l2 is None else l2) / 2 / max(bytes_of_head, 1)
    least = least_heads(tiles * group, device)
    even = [each for each in range(1, heads + 1) if heads % each == 0 and each >= least] or [max(heads, 1)]
    at_once = max((each for each in even if each <= fitting), default=even[0])
    return Order(tiles, at_once * group, heads // at_once)
