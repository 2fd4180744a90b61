"""A block of attention's Hopper kernels: roles of its warps, and its shared memory with rings that TMA fills.

A block has three warpgroups. Two multiply, and one thread of the third copies with TMA: FlashAttention-3's warp
specialization (arXiv:2407.08608, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cuda_kernels.attention.spec import ROWS
from cuda_kernels.attention.tiles import tile_of
from cuda_kernels.device.language import cuda, device, i32
from cuda_kernels.device.sm90 import (
    elect_sync,
    fence_mbarrier_init,
    grid_constant_params,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensormap,
    shfl_sync_0,
    tma_load,
    warpgroup_reg_alloc,
    warpgroup_reg_dealloc,
)
from cuda_kernels.kernel import Kernel

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


MULTIPLYING = 256
"""Threads of the two warpgroups that multiply."""
PRODUCER = 2
"""Index of the third warpgroup."""
_THREADS = 384
_PRODUCER_REGISTERS = 24
_REGISTERS = 240


def make_warp_specialized(init_barriers: Any, produce: Any) -> Any:
    """A device function ``(smem, maps, table, heads_at_once, shape) -> tile, head, wg_idx, warp``, called first.

    It initializes barriers, loads the block's tile and head, and allocates each warpgroup's registers. One thread of
    the warpgroup :data:`PRODUCER` copies all operands here, and returns when it is done.

    Args:
        init_barriers: a device function of shared memory's address.
        produce: a device function ``(smem, maps, tile, head, shape)`` of the thread that copies.
    """

    @device
    def begin(smem, maps, table, heads_at_once, shape):
        grid_constant_params()
        wg_idx, warp = shfl_sync_0(cuda.threadIdx.x >> 7), shfl_sync_0(cuda.threadIdx.x >> 5)
        if cuda.threadIdx.x == 0:
            for index in range(len(maps)):
                prefetch_tensormap(maps[index])
            init_barriers(smem)
            fence_mbarrier_init()
        cuda.syncthreads()
        tile, head = tile_of(table, heads_at_once)
        if wg_idx == PRODUCER:
            warpgroup_reg_dealloc(_PRODUCER_REGISTERS)
            if warp == 4 * PRODUCER and elect_sync():
                produce(smem, maps, tile, head, shape)
        else:
            warpgroup_reg_alloc(_REGISTERS)
        return tile, head, wg_idx, warp

    return begin


@device
def accumulator_origin(wg_idx):
    """Row and column, in the block's 128 rows, of this thread's first element of its warpgroup's accumulator.

    Its second row is eight below (PTX ISA, "Accumulator D fragment layout for wgmma .m64nNk32").
    """
    wg_thread = cuda.threadIdx.x & 127
    lane = wg_thread & 31
    return i32(wg_idx * 64 + (wg_thread >> 5) * 16 + (lane >> 2)), i32(2 * (lane & 3))


def attention_on_hopper(name: str, function: Any, parameters: Mapping[str, Any], offsets: dict[str, int]) -> Kernel:
    """The declaration of a kernel with such blocks; ``offsets``: its buffers, from :func:`placed`."""
    return Kernel(name, function, parameters, _THREADS, shared_bytes=offsets["end"], architectures=("90a",))
