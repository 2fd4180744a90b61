"""Sums over rows, float32, in two stages, whose order depends on shapes and on the number of multiprocessors alone.

| | a bias' gradient, beside its cast | gradients of a norm's weight and bias |
|---|---|---|
| first stage, in ``cuda_kernels`` | ``casts/column_sums.py``, ``summed_loader`` | ``norm/backward.py`` |
| a partial sum is of | 16 rows that follow each other | a block's rows: every n-th |
| n, how many there are | :func:`num_tile_sums` | :func:`num_block_sums`, the blocks of the grid |
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
    """The number of partial sums where each is of :data:`WARP_ROWS` rows that follow each other, as a warp has them."""
    return ceil_div(rows, WARP_ROWS)


def num_block_sums(kernel: Kernel, rows: int, device: torch.device) -> int:
    """The number of partial sums where each is of a block's rows: as many as blocks that run at once, or as rows.

    On cards with GDDR memory one block less may fit into a multiprocessor: the last ones then wait.
    """
    return min(rows, kernel.min_blocks_per_sm * launch.multiprocessors(device))


class ColumnSums:
    """Reduces partial sums, float32 ``[num_sets, n, stride]``, over ``n`` to ``num_sets`` rows of ``columns``.

    Attributes:
        reduce: starts the launch that adds up, with the addresses of the partial sums, of the sums of the first set, of
            those of the second (0 without), and :attr:`stride`.
        stride: elements from row to row of the partial sums.
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
