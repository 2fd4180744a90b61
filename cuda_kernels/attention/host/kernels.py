"""Which of attention's kernels a device gets, and how they take their operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.attention.backward.dkv import attention_dkv_kernel
from cuda_kernels.attention.backward.dkv_256 import attention_dkv_256_kernel
from cuda_kernels.attention.backward.dq import attention_dq_kernel
from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.mma import operands as mma
from cuda_kernels.attention.mma.dkv import RESULTS, mma_attention_dkv_kernel
from cuda_kernels.attention.mma.dkv_256 import make_wide_dkv
from cuda_kernels.attention.mma.dq import mma_attention_dq_kernel
from cuda_kernels.attention.mma.dq_256 import make_wide_dq
from cuda_kernels.attention.mma.forward import mma_attention_forward_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.launch import Argument, address_on, architecture_of
from cuda_kernels.host.tensor_maps import Box, map_on
from cuda_kernels.kernel import Kernel


def forward_kernels(spec: AttentionSpec, device: torch.device) -> list[Kernel]:
    """The forward pass, some channels in a launch; all variants take the same parameters.

    Operands are as :func:`operand_on` says. Where there is no kernel for the device, loading it fails with a
    :class:`~cuda_kernels.kernel.KernelError`.
    """
    if not _multiplies_in_warps(device):
        return [attention_forward_kernel(spec)]
    return [
        mma_attention_forward_kernel(spec, first_channel) for first_channel in range(0, spec.head_dim, mma.CHANNELS)
    ]


def dq_kernel(spec: AttentionSpec, device: torch.device) -> Kernel:
    """dQ, as :func:`forward_kernels` is the forward pass."""
    if not _multiplies_in_warps(device):
        return attention_dq_kernel(spec)
    return mma_attention_dq_kernel(spec) if spec.panels == 1 else make_wide_dq(spec)


def dkv_kernels(spec: AttentionSpec, device: torch.device, flush: int) -> list[Kernel]:
    """dK and dV, as :func:`forward_kernels` is the forward pass; one makes both where their sums fit into registers.

    ``flush`` is for kernels that use scratch.
    """
    if _multiplies_in_warps(device):
        if spec.panels == 1:
            return [mma_attention_dkv_kernel(spec, result) for result in RESULTS[spec.head_dim]]
        return [make_wide_dkv(spec, "dv"), make_wide_dkv(spec, "dk")]
    if spec.panels == 1:
        return [attention_dkv_kernel(spec, flush)]
    return [attention_dkv_256_kernel(spec, "dv", flush), attention_dkv_256_kernel(spec, "dk", flush)]


def blocks_of_tile(spec: AttentionSpec, device: torch.device) -> int:
    """Blocks that share a tile of a head in the backward pass, each with some channels of the result."""
    return -(-spec.head_dim // mma.CHANNELS) if _multiplies_in_warps(device) else 1


def uses_scratch(device: torch.device) -> bool:
    """Whether sums for dK and dV leave registers on the way; where they do not, scratch may be absent."""
    return not _multiplies_in_warps(device)


def operand_on(device: torch.device, box: Box) -> Callable[[Tensor], Argument]:
    """Operand to launch argument: Hopper's kernels take tensor maps of ``box``, the others addresses."""
    return address_on(device) if _multiplies_in_warps(device) else map_on(device, box)


def _multiplies_in_warps(device: torch.device) -> bool:
    return architecture_of(device) in mma.ARCHITECTURES
