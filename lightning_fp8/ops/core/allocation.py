"""Fast allocation on the current device, past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import repeat

import torch
from torch import Tensor

from lightning_fp8.ops.core.layout import ABSENT, Allocation

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
