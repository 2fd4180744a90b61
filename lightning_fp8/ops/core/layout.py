"""Memory layouts of tensors: the keys of plans, alignment, and the strides that kernels write and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.scaled import Layout

ALIGNMENT = 16
"""Bytes at multiples of which rows of codes begin: TMA, and vector loads, want no less."""

Key = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
KeyAndDevice = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device]


def key(x: Tensor) -> Key:
    """The key of a tensor in a plan cache: a plain tuple, for speed; planners make a :class:`TensorKey` of it."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT


def key_and_device(x: Tensor) -> KeyAndDevice:
    """The key of a tensor that may be on another device than the one planned for."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.device


def memoryless_key(x: Tensor) -> KeyAndDevice:
    """The key of a tensor whose strides and alignment do not matter to a plan."""
    return x.dtype, x.shape, (), 0, x.device


class TensorKey(NamedTuple):
    """The key of a tensor of one or two dimensions: all tensors of one key are served by one plan.

    Attributes:
        dtype, shape, device: the tensor's.
        strides: in elements.
        address: of the first element, modulo 16.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    address: int
    device: torch.device

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def stride(self) -> int:
        """Elements from row to row; 0 of a vector."""
        return self.strides[0] if len(self.shape) == 2 else 0

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether a row's elements are side by side."""
        return self.strides[-1] == 1 or self.columns == 1

    def is_vectorizable(self, elements: int, alignment: int | None = None) -> bool:
        """Whether every row consists of whole vectors of ``elements``, each at a multiple of ``alignment`` bytes.

        ``alignment`` is the vector's own size unless given.
        """
        item = self.dtype.itemsize
        alignment = alignment or elements * item
        starts_aligned = self.stride * item % alignment == 0 and self.address % alignment == 0
        return starts_aligned and self.columns % elements == 0


ABSENT = (0,)
"""Shape of the tensor that stands for a result that was not asked for."""


class Allocation(NamedTuple):
    """The memory of a tensor that an op allocates.

    Attributes:
        shape, strides: in elements, padding included.
        columns: how many of them the tensor shows; None for all.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None

    @classmethod
    def absent(cls, dtype: torch.dtype) -> Allocation:
        """The memory of a result that was not asked for."""
        return cls(ABSENT, (1,), dtype)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """The memory of a tensor of at most two dimensions without padding."""
        strides = (max(shape[1], 1), 1) if len(shape) == 2 else (1,) * len(shape)
        return cls(shape, strides, dtype)

    def t(self) -> Allocation:
        """The memory of the transposed view."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def empty(self, device: torch.device) -> Tensor:
        """Allocate it there, uninitialized, by way of the dispatcher."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return tensor if self.columns is None else tensor[:, : self.columns]


def operand_allocations(layout: Layout, dtype: torch.dtype, rows: int, columns: int) -> tuple[Allocation, Allocation]:
    """The memory of ``data`` and ``scale_inv`` of an ``[rows, columns]`` GEMM operand, as kernels write and read it.

    Rows of ``data`` begin at multiples of 16 bytes; zeros fill the gap. Scales that are MN-major begin a row of blocks
    at a multiple of 16 bytes.
    """
    stride = ceil_div(columns, ALIGNMENT) * ALIGNMENT
    data = Allocation((rows, stride), (stride, 1), dtype, None if stride == columns else columns)
    shape = layout.scale_shape(rows, columns)
    if layout.has_one_scale:
        return data, Allocation.contiguous(shape, layout.scale_dtype)
    per_line = ALIGNMENT // layout.scale_dtype.itemsize
    strides = (1, ceil_div(rows, per_line) * per_line) if layout.scale_major == "mn" else (shape[1], 1)
    return data, Allocation(shape, strides, layout.scale_dtype)


def empty_operand(
    device: torch.device, layout: Layout, dtype: torch.dtype, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Allocate ``data`` and ``scale_inv`` as :func:`operand_allocations` says."""
    data, scale_inv = operand_allocations(layout, dtype, rows, columns)
    return data.empty(device), scale_inv.empty(device)


def copy_bits(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of one shape; FP8 and E8M0 as bytes, which every device can copy."""
    dtype = torch.uint8 if source.element_size() == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))
