"""Checks of an op's arguments, and the dtypes that ops take. Each call checks once; see :mod:`lightning_fp8.ops.op`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_kernels.device.codec import DtypeName

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""Names of the dtypes that are not FP8, as kernels know them."""

HIGH_PRECISION = tuple(DTYPE_NAMES)
"""The dtypes that ops cast from, and give GEMMs' results in."""


def require(
    name: str,
    tensor: Tensor | None,
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
    if isinstance(dtypes, torch.dtype):  # and not Sequence, which is slow to ask for
        dtypes = (dtypes,)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.shape != shape and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and what it belongs to on {device}; move one to the other")


def require_scalar(name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Check a scale or an amax, float32 ``[]``; None passes.

    Raises:
        TypeError, ValueError: as :func:`require`.
    """
    if tensor is not None and (tensor.dtype is not torch.float32 or tensor.dim() or tensor.device != device):
        require(name, tensor, torch.float32, (), device)


def require_contiguous(name: str, tensor: Tensor | None) -> None:
    """Check that kernels can read or write a tensor from its first address on; None passes.

    Raises:
        ValueError: its elements are not side by side.
    """
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous; pass {name}.contiguous()")
