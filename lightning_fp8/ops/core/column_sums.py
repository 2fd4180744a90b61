"""Sums over rows in two stages: kernels store partial sums, and a second kernel adds them up in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_kernels.casts.column_sums import COLUMNS, column_sums_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch
from lightning_fp8.ops.core.allocation import allocator
from lightning_fp8.ops.core.options import DTYPE_NAMES


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
