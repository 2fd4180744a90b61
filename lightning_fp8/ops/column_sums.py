"""Sums over rows in float32, in two stages. Their order only depends on shapes and the number of multiprocessors.

| | the gradient of a bias, in a cast | the gradients of a norm's weight and bias |
|---|---|---|
| first stage, in ``cuda_kernels`` | ``casts/column_sums.py``, ``summed_loader`` | ``norm/backward.py`` |
| rows of a partial sum | 16 consecutive rows | the rows of a thread block: every n-th |
| number n of partial sums | :func:`num_tile_sums` | :func:`num_block_sums`, the thread blocks of the grid |
| second stage | ``casts/column_sums.py``, ``column_sums_kernel`` | the same |
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_kernels.casts.column_sums import COLUMNS, column_sums_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.device.tile import WARP_ROWS
from cuda_kernels.host import launch
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.memory import allocator


def num_tile_sums(rows: int) -> int:
    """The number of partial sums if each is over :data:`WARP_ROWS` consecutive rows, which one warp processes."""
    return ceil_div(rows, WARP_ROWS)


def num_block_sums(kernel: Kernel, rows: int, device: torch.device) -> int:
    """The number of partial sums if each is over the rows of a thread block.

    It is the number of thread blocks that run concurrently, and at most the number of rows. On GPUs with GDDR
    memory, a multiprocessor may run one thread block fewer; the last thread blocks then run in a second wave.
    """
    return min(rows, kernel.min_blocks_per_sm * launch.multiprocessors(device))


class ColumnSums:
    """Reduces partial sums, float32 ``[num_sets, n, stride]``, over ``n`` to ``num_sets`` rows of ``columns``.

    Attributes:
        reduce: launches the second stage, given the addresses of the partial sums, of the sums of the first set and of
            the sums of the second set (0 if there is none), and :attr:`stride`.
        stride: the row stride of the partial sums in elements.
    """

    def __init__(self, device: torch.device, n: int, columns: int, dtype: torch.dtype, num_sets: int) -> None:
        self.stride = ceil_div(columns, 4) * 4
        self._allocate = allocator(device)
        self._partials = (num_sets * n * self.stride,), (1,), torch.float32
        blocks = num_sets * ceil_div(columns, COLUMNS)
        self.reduce = launch.Launch(column_sums_kernel(DTYPE_NAMES[dtype]), blocks, (n, columns), device).run

    def partials(self) -> Tensor:
        """Allocate the partial sums, uninitialized."""
        return self._allocate(*self._partials)
