"""The fused ops on CUDA tensors: planned, allocated and started as in :mod:`lightning_fp8.ops.cuda`.

Nothing here waits for the device: whether a given scale is 0 is asked by the kernels.
"""

from __future__ import annotations

import torch

from lightning_fp8.ops.fused.cuda_activation import activation_backward_quantize, activation_quantize
from lightning_fp8.ops.fused.cuda_norm import norm_quantize
from lightning_fp8.ops.fused.cuda_norm_backward import norm_backward
from lightning_fp8.ops.schema import NAMESPACE, UNOBSERVED

for _op in (norm_quantize, activation_quantize, activation_backward_quantize):
    for _name in (_op.__name__, _op.__name__ + UNOBSERVED):
        torch.library.impl(f"{NAMESPACE}::{_name}", "cuda", _op)
torch.library.impl(f"{NAMESPACE}::norm_backward", "cuda", norm_backward)
