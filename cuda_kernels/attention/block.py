"""Shared memory of a block of attention's Hopper kernels: buffers, and rings of stages that TMA fills."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.attention.spec import ROWS
from cuda_kernels.device.language import device
from cuda_kernels.device.sm90 import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait, tma_load

TILE = ROWS * 128
"""Bytes of 128 rows of 128 bytes each; channels beyond head_dim are 0."""
HALF_TILE = TILE // 2
"""Bytes of a warpgroup's 64 rows."""


def placed(**sizes: int) -> dict[str, int]:
    """Byte offsets of consecutive buffers in shared memory; ``end`` is the total size."""
    offsets: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def per_stage(stages: int, **sizes: int) -> dict[str, int]:
    """Sizes of a ring's buffers, given their ``sizes`` per stage."""
    return {name: stages * size for name, size in sizes.items()}


@device
def init_ring(full, empty, stages, readers):
    """Initialize a ring's barriers: ``full`` counts the bytes written by TMA, ``empty`` the readers that are done."""
    for stage in range(stages):
        mbarrier_init(full + 8 * stage, 1)
        mbarrier_init(empty + 8 * stage, readers)


@device
def fill_stage(full, empty, phase, size):
    """Wait until a stage is empty, and expect ``size`` bytes."""
    mbarrier_wait(empty, phase ^ 1)
    mbarrier_arrive_expect_tx(full, size)


@cache
def make_row_load(panels: int) -> Any:
    """A device function ``(shared, tensor, barrier, first_row)`` that copies 128 rows of codes.

    Channels beyond 128 are copied to a second panel, after the first.
    """

    @device
    def load(shared, tensor, barrier, first_row):
        for panel in range(panels):
            tma_load(shared + panel * TILE, tensor, barrier, panel * 128, first_row)

    return load


@cache
def make_own_load(panels: int) -> Any:
    """A device function ``(x, map_x, y, map_y, barrier, first_row)`` that copies the block's own 128 rows of both.

    ``x``, ``y``: their destinations in shared memory.
    """
    load_rows = make_row_load(panels)

    @device
    def load(x, map_x, y, map_y, barrier, first_row):
        mbarrier_arrive_expect_tx(barrier, 2 * panels * TILE)
        load_rows(x, map_x, barrier, first_row)
        load_rows(y, map_y, barrier, first_row)

    return load
