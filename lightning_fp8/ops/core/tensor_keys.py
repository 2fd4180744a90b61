"""The keys of tensors in plan caches: dtype, shape, strides and alignment, which a plan depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.core.alignment import ALIGNMENT

PlainKey = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
KeyAndDevice = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device]


def tensor_key(x: Tensor) -> PlainKey:
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
        misalignment: bytes by which the first element lies behind a multiple of 16.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    misalignment: int
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
        starts_aligned = self.stride * item % alignment == 0 and self.misalignment % alignment == 0
        return starts_aligned and self.columns % elements == 0
