"""Checks of the tensors that an op takes beside its input: amaxes, scales, statistics, whose addresses kernels take.

The reference checks at each call, which costs little beside what it computes. Where a kernel runs, a call takes
microseconds. There, what is part of a plan's key is checked when the plan is made; a scale or an amax, which keeps its
address from step to step, is checked when its address first appears.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cuda_kernels.host import launch

MAX_ADDRESSES = 2**12
"""Addresses that a plan remembers: scales and amaxes of the layers that share it."""


class Described(Protocol):
    """A tensor, or the key of one."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> torch.device: ...


def require(
    name: str,
    tensor: Described | None,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
) -> None:
    """Check a tensor's dtype, shape and device; None passes.

    Raises:
        TypeError: another dtype than ``dtypes``.
        ValueError: another shape or device.
    """
    if tensor is None:
        return
    dtypes = dtypes if isinstance(dtypes, Sequence) else (dtypes,)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and what it belongs to on {device}; move one to the other")


def require_contiguous(name: str, tensor: Tensor | None) -> None:
    """Check that kernels can read or write a tensor from its first address on; None passes.

    Raises:
        ValueError: its elements are not side by side.
    """
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous; pass {name}.contiguous()")


class CheckedAddresses(set[object]):
    """Addresses of tensors that passed their checks, which are not checked again; and 0, which stands for no tensor.

    Only 0 is among them where launches take tensors themselves.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__((0,))
        self._is_cuda = launch.is_cuda_device(device)

    def keep(self, *addresses: object) -> None:
        """Remember addresses, if there is room."""
        if self._is_cuda and len(self) < MAX_ADDRESSES:
            self.update(addresses)
