"""Which of attention's kernels a device uses, and how they take operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.attention.backward.dkv import attention_dkv_256_kernel, attention_dkv_kernel
from cuda_kernels.attention.backward.dq import attention_dq_kernel
from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.mma import operands as mma
from cuda_kernels.attention.mma.dkv import RESULTS, mma_attention_dkv_kernel
from cuda_kernels.attention.mma.dq import mma_attention_dq_kernel
from cuda_kernels.attention.mma.forward import mma_attention_forward_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.launch import Argument, Box, address_on, architecture_of
from cuda_kernels.host.tensor_maps import map_on
from cuda_kernels.kernel import Kernel


def forward_kernels(spec: AttentionSpec, device: torch.device) -> list[Kernel]:
    """Kernels of the forward pass, one per launch and range of channels; all variants have the same parameters.

    Operands are passed as by :func:`operand_on`. If the device is not supported, loading fails with a
    :class:`~cuda_kernels.kernel.KernelError`.
    """
    if not multiplies_in_warps(device):
        return [attention_forward_kernel(spec)]
    first_channels = range(0, spec.head_dim, mma.CHANNELS)
    return [mma_attention_forward_kernel(spec, first_channel) for first_channel in first_channels]


def dq_kernel(spec: AttentionSpec, device: torch.device) -> Kernel:
    """The kernel for dQ; see :func:`forward_kernels`."""
    return mma_attention_dq_kernel(spec) if multiplies_in_warps(device) else attention_dq_kernel(spec)


def dkv_kernels(spec: AttentionSpec, device: torch.device, flush: int) -> list[Kernel]:
    """Kernels for dK and dV; one computes both if their sums fit into registers. See :func:`forward_kernels`.

    ``flush`` is for kernels that use scratch memory.
    """
    if multiplies_in_warps(device):
        return [mma_attention_dkv_kernel(spec, result) for result in RESULTS[spec.head_dim]]
    if spec.panels == 1:
        return [attention_dkv_kernel(spec, flush)]
    return [attention_dkv_256_kernel(spec, "dv", flush), attention_dkv_256_kernel(spec, "dk", flush)]


def blocks_of_tile(spec: AttentionSpec, device: torch.device) -> int:
    """Number of blocks that share a tile of a head in the backward pass, each for some channels of the result."""
    return -(-spec.head_dim // mma.CHANNELS) if multiplies_in_warps(device) else 1


def operand_on(device: torch.device, box: Box) -> Callable[[Tensor], Argument]:
    """From an operand to a launch argument: Hopper's kernels take tensor maps of ``box``, the others addresses."""
    return address_on(device) if multiplies_in_warps(device) else map_on(device, box)


def multiplies_in_warps(device: torch.device) -> bool:
    """Whether the device has no wgmma; its kernels for dK and dV use no scratch memory."""
    return architecture_of(device) in mma.ARCHITECTURES
