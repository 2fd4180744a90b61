"""The memory of results: its shape and strides, and its fast allocation, past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

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


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""``(shape, strides, dtype) -> tensor``, uninitialized."""


def allocator(device: torch.device) -> Allocator:
    """A function that allocates on devices of ``device``'s type; of several GPUs, on the current one."""
    try:  # as Inductor does, past the dispatcher
        from torch._C._dynamo import guards

        return getattr(guards, f"_empty_strided_{device.type}")
    except (ImportError, AttributeError):
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device.type)


def maker(device: torch.device, allocation: Allocation) -> Callable[[], Tensor]:
    """A function that allocates one tensor at each call; a tensor that was not asked for is always the same."""
    shape, strides, dtype, columns = allocation
    if shape == ABSENT:
        return repeat(empty_tensor(device, dtype)).__next__  # as a lambda would, without a frame of Python
    new = partial(allocator(device), shape, strides, dtype)
    return new if columns is None else lambda: new()[:, :columns]


@lru_cache(None)
@torch.inference_mode(False)  # the tensor is given to training too
def empty_tensor(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor ``[0]`` that stands for a result that was not asked for."""
    return torch.empty(0, dtype=dtype, device=device)


def copy_bits(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of one shape; FP8 and E8M0 as bytes, which every device can copy."""
    dtype = torch.uint8 if source.element_size() == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))
