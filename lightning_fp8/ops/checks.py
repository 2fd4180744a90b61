"""Checks of an op's arguments, which run once in each call (see :mod:`lightning_fp8.ops.op`), and supported dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_kernels.device.sizes import DtypeName

DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""The names that kernels use for the dtypes that are not FP8."""

HIGH_PRECISION = tuple(DTYPE_NAMES)
"""The dtypes that ops cast from, and the result dtypes of GEMMs."""


def require(
    name: str,
    tensor: Tensor | None,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
) -> None:
    """Check the dtype, shape and device of a tensor, unless it is None.

    Raises:
        TypeError: If its dtype is not in ``dtypes``.
        ValueError: If its shape or device does not match.
    """
    if tensor is None:
        return
    if isinstance(dtypes, torch.dtype):  # isinstance(dtypes, Sequence) would be slow
        dtypes = (dtypes,)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.shape != shape and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have {list(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the other tensors are on {device}; move it there")


def require_matrix(x: Tensor, *_: object) -> None:
    """Check ``x``, the first of an op's arguments.

    Raises:
        TypeError: If it is not two-dimensional, or not of :data:`HIGH_PRECISION`.
    """
    if x.dtype not in HIGH_PRECISION or x.dim() != 2:
        raise TypeError(
            f"x must be a 2-D tensor in bfloat16, float16 or float32, not {x.dtype} of shape {tuple(x.shape)}"
        )


def require_scalar(name: str, tensor: Tensor | None, device: torch.device) -> None:
    """Check a scale or an amax, float32 ``[]``, unless it is None.

    Raises:
        TypeError, ValueError: See :func:`require`.
    """
    if tensor is not None and (tensor.dtype is not torch.float32 or tensor.dim() or tensor.device != device):
        require(name, tensor, torch.float32, (), device)


def require_contiguous(name: str, tensor: Tensor | None) -> None:
    """Check that a tensor is contiguous, unless it is None. Kernels index it from its first address.

    Raises:
        ValueError: If it is not contiguous.
    """
    if tensor is not None and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, but must be contiguous; pass {name}.contiguous()")
