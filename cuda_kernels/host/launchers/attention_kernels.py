"""Which of attention's kernels a device gets, and how they take their operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.mma import operands as mma
from cuda_kernels.attention.mma.forward import mma_attention_forward_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.launch import Argument, address_on, architecture_of
from cuda_kernels.host.tensor_maps import Box, map_on
from cuda_kernels.kernel import Kernel


def forward_kernel(spec: AttentionSpec, device: torch.device) -> Kernel:
    """The forward pass; all variants take the same parameters, operands as :func:`operand_on` says.

    Where there is none for the device, loading it fails with a :class:`~cuda_kernels.kernel.KernelError`.
    """
    return (
        mma_attention_forward_kernel(spec) if _by_mma(spec, device, mma.HEAD_DIMS) else attention_forward_kernel(spec)
    )


def operand_on(device: torch.device, box: Box) -> Callable[[Tensor], Argument]:
    """Operand to launch argument: Hopper's kernels take tensor maps of ``box``, the others addresses."""
    return address_on(device) if _multiplies_in_warps(device) else map_on(device, box)


def _by_mma(spec: AttentionSpec, device: torch.device, head_dims: tuple[int, ...]) -> bool:
    return spec.head_dim in head_dims and _multiplies_in_warps(device)


def _multiplies_in_warps(device: torch.device) -> bool:
    return architecture_of(device) in mma.ARCHITECTURES
