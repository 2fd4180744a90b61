"""What ops are given beside the tensor they are about: amaxes, scales, statistics, whose addresses kernels take.

The reference checks at each call, which is little beside what it does. Where a kernel runs, a call takes microseconds:
what a plan is looked up by is checked when the plan is made (see :mod:`lightning_fp8.ops.planning`), and a scale or an
amax, which stays where it is from step to step, when its address is first seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fp8.ops.config import NAMES

Lie = tuple[torch.dtype, Sequence[int], torch.device]
"""Dtype, shape and device."""


def lie_of(tensor: Tensor | None) -> Lie | None:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.device)


def compact(name: str, tensor: Tensor | None) -> Lie | None:
    """How a tensor lies that a kernel reads or writes from its first address on.

    Raises:
        ValueError: its elements are not side by side.
    """
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous; pass {name}.contiguous()")
    return lie_of(tensor)


def require(
    name: str, lie: Lie | None, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int], device: torch.device
) -> None:
    """Raises:
    TypeError: another dtype than ``dtypes``.
    ValueError: another shape or device; None is neither.
    """
    if lie is None:
        return
    dtypes = dtypes if isinstance(dtypes, Sequence) else (dtypes,)
    if lie[0] not in dtypes:
        raise TypeError(f"{name} is {lie[0]}; it must be {' or '.join(map(str, dtypes))}")
    if tuple(lie[1]) != tuple(shape):
        raise ValueError(f"{name} has shape {list(lie[1])}; it must have {list(shape)}")
    if lie[2] != device:
        raise ValueError(f"{name} is on {lie[2]} and what it belongs to on {device}; move one to the other")


def require_beside_a_cast(device: torch.device, scale: Lie | None, amax: Lie | None, counts: Lie | None) -> None:
    """What a cast on ``device`` takes: float32 ``[]`` scale and amax, int64 ``[2]`` counts.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("scale", scale, torch.float32, (), device)
    require("amax", amax, torch.float32, (), device)
    require("counts", counts, torch.int64, (2,), device)


class Checked:
    """Addresses of what was found to fit, which is not looked at again.

    Attributes:
        known: 0, which stands for nothing, and those addresses; only 0 where launches take tensors themselves.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda_kernels.host import launch

        self._is_cuda, self.known = launch.is_cuda_device(device), set[object]({0})

    def keep(self, *addresses: object) -> None:
        if self._is_cuda and len(self.known) < KEPT_ADDRESSES:
            self.known.update(addresses)


KEPT_ADDRESSES = 2**12
"""Of each plan: scales and amaxes of the layers that share it."""


def require_of_an_update(amax: Tensor, amax_history: Tensor, scale: Tensor, fp8_max: Tensor) -> None:
    """What an update takes: float32 ``[n]``, and a window of ``[len, n]`` with at least one row, on one device.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    rows, length, device = amax.numel(), amax_history.shape[0] if amax_history.dim() else 1, amax.device
    for name, tensor, shape in (
        ("amax", amax, (rows,)),
        ("amax_history", amax_history, (max(length, 1), rows)),
        ("scale", scale, (rows,)),
        ("fp8_max", fp8_max, (rows,)),
    ):
        require(name, compact(name, tensor), torch.float32, shape, device)


def require_gradient(dy: Lie | None, shape: Sequence[int], device: torch.device) -> None:
    """A gradient of a result of ``shape``, in high precision.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("dy", dy, tuple(NAMES), shape, device)


def require_beside_a_norm(
    columns: Sequence[int], device: torch.device, weight: Lie | None, bias: Lie | None = None
) -> None:
    """The parameters ``[K]`` of a norm of ``x [R, K]``.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("weight", weight, tuple(NAMES), columns, device)
    require("bias", bias, tuple(NAMES) if weight is None else weight[0], columns, device)


def require_statistics(statistics: Lie | None, rms: bool, rows: int, device: torch.device) -> None:
    """What ``norm_quantize`` gave for as many rows.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("statistics", statistics, torch.float32, (1 if rms else 2, rows), device)


def require_beside_a_product(
    shape: tuple[int, int], device: torch.device, bias: Lie | None, out: Lie | None = None, amax: Lie | None = None
) -> None:
    """What a product of ``shape [M, N]`` takes: a bias ``[N]``, what to add to, and an amax.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    require("bias", bias, tuple(NAMES), shape[1:], device)
    require("out", out, tuple(NAMES), shape, device)
    require("amax", amax, torch.float32, (), device)
