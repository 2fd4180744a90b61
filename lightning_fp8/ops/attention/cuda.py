"""The ops on CUDA tensors: there is no kernel yet, which is said once; the specification computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_kernels.kernel import KernelError
from lightning_fp8.ops.attention import cpu
from lightning_fp8.ops.core.dispatch import Op, current_device, planned
from lightning_fp8.ops.core.registration import implement


@planned(cpu.attention_forward)
def _forward_plan(device: torch.device) -> Op:
    raise KernelError("FP8 attention has no CUDA kernel yet")


@planned(cpu.attention_backward)
def _backward_plan(device: torch.device) -> Op:
    raise KernelError("FP8 attention has no CUDA kernel yet")


def attention_forward(q: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    return _forward_plan(q.device, q.is_cuda and current_device())(q, *others)


def attention_backward(do: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    return _backward_plan(do.device, do.is_cuda and current_device())(do, *others)


for _op in (attention_forward, attention_backward):
    implement(_op.__name__, "cuda", _op)
