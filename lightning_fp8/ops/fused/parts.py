"""What the plans of the fused ops share: how an input lies, and sums over rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.config import NAMES
from lightning_fp8.ops.operands import allocator, comes_in_vectors
from lightning_fp8.ops.planning import refuse_empty

Results = tuple[Tensor, ...]


class Place(NamedTuple):
    """How a tensor lies: ``address`` modulo 16, ``stride`` in elements from row to row; 0 of a vector."""

    dtype: torch.dtype
    columns: int
    stride: int
    address: int

    def comes_in(self, elements: int, size: int | None = None) -> bool:
        """Whether its rows are whole vectors; see :func:`comes_in_vectors`."""
        return comes_in_vectors(self.columns, self.stride, self.address, self.dtype.itemsize, elements, size)


def place_of(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int) -> Place | None:
    """Where a tensor of one or two dimensions lies; None if the elements of a row are not side by side."""
    refuse_empty(shape)
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    return Place(dtype, shape[-1], strides[0] if len(shape) == 2 else 0, address % 16)


class ColumnSums:
    """Adds up ``of`` sets of partial sums, float32 ``[of, n, stride]``.

    Attributes:
        stride: from row to row of partial sums, in elements.
    """

    def __init__(self, device: torch.device, n: int, columns: int, dtype: torch.dtype, of: int) -> None:
        from cuda_kernels.casts import column_sums
        from cuda_kernels.host import launch

        self.stride = -(-columns // 4) * 4
        self._at, self._allocate = launch.address_on(device), allocator(device)
        self._partials = (of * n * self.stride,), (1,), torch.float32
        blocks = of * -(-columns // column_sums.COLUMNS)
        kernel = column_sums.column_sums_kernel(NAMES[dtype])
        self._start = launch.Launch(kernel, blocks, (n, columns), device).start

    def partials(self) -> Tensor:
        """Memory for the partial sums."""
        return self._allocate(*self._partials)

    def add(self, partials: Tensor, out: Tensor, other: Tensor | None = None) -> None:
        at = self._at
        self._start(at(partials), at(out), 0 if other is None else at(other), self.stride)
