"""Which heads' blocks run together, and that each tile of each head has one block."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_kernels.attention.host import order
from cuda_kernels.attention.host.order import grid_of_tiles
from cuda_kernels.host.launch import Grid

CPU = torch.device("cpu")


def grid(heads: int, tiles: int, megabytes: float, l2_megabytes: int = 60, multiprocessors: int = 132) -> Grid:
    """The grid on a GPU of these sizes, by default those of an H200."""
    with (
        patch.object(order, "l2_bytes", lambda device: l2_megabytes * 2**20),
        patch.object(order, "multiprocessors", lambda device: multiprocessors),
    ):
        return grid_of_tiles(heads, tiles, megabytes * 2**20, CPU)


@pytest.mark.parametrize(
    ("heads", "tiles", "megabytes", "right"),
    [
        (16, 256, 1.0, (16, 256, 1)),  # all 16 MB fit into half of the cache
        (16, 256, 8.0, (2, 256, 8)),  # 3 heads would fit, and 2 divide 16
        (16, 256, 17.0, (2, 256, 8)),  # one fits, and its 256 blocks are not two waves of 132
        (16, 264, 17.0, (1, 264, 16)),
        (25, 16, 17.0, (25, 16, 1)),  # 5 heads have 80 blocks
        (25, 60, 1.0, (25, 60, 1)),
        (25, 60, 4.0, (5, 60, 5)),
        (2, 3, 100.0, (2, 3, 1)),
        (1, 1, 0.0, (1, 1, 1)),
    ],
)
def test_heads_at_once_by_hand(heads: int, tiles: int, megabytes: float, right: Grid) -> None:
    assert grid(heads, tiles, megabytes) == right


@given(st.integers(1, 200), st.integers(0, 2000), st.floats(0, 500), st.integers(1, 200))
def test_each_tile_of_each_head_has_one_block(heads: int, tiles: int, megabytes: float, multiprocessors: int) -> None:
    at_once, y, sections = grid(heads, tiles, megabytes, multiprocessors=multiprocessors)
    assert y == tiles
    assert at_once * sections == heads
    assert at_once == heads or at_once * max(tiles, 1) >= 2 * multiprocessors
