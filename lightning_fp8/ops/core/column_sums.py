"""Sums over rows in two stages: kernels store partial sums, and a second kernel adds them up in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_kernels.casts.column_sums import COLUMNS, column_sums_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch
from lightning_fp8.ops.core.allocation import allocator
from lightning_fp8.ops.core.options import NAMES


class ColumnSums:
    """Reduces partial sums, float32 ``[num_sets, n, stride]``, over ``n`` to ``num_sets`` rows of ``columns``.

    Attributes:
        stride: elements from row to row of the partial sums.
    """

    def __init__(self, device: torch.device, n: int, columns: int, dtype: torch.dtype, num_sets: int) -> None:
        self.stride = ceil_div(columns, 4) * 4
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._partials = (num_sets * n * self.stride,), (1,), torch.float32
        blocks = num_sets * ceil_div(columns, COLUMNS)
        self._launch = launch.Launch(column_sums_kernel(NAMES[dtype]), blocks, (n, columns), device).start

    def partials(self) -> Tensor:
        """Allocate the partial sums, uninitialized."""
        return self._allocate(*self._partials)

    def reduce(self, partials: Tensor, out: Tensor, second_out: Tensor | None = None) -> None:
        """Add up the partial sums; ``second_out`` takes those of the second set."""
        pointer = self._pointer
        self._launch(
            pointer(partials), pointer(out), 0 if second_out is None else pointer(second_out), self.stride
        )  # fmt: skip
