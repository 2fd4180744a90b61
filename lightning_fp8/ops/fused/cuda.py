"""The fused ops on CUDA tensors: planned, allocated and started as in :mod:`lightning_fp8.ops.cuda`.

Nothing here waits for the device: whether a given scale is 0 is asked by the kernels.
"""

from __future__ import annotations

import torch

from lightning_fp8.ops.fallback import falls_back
from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.cuda_activation import activation_backward_quantize, activation_quantize
from lightning_fp8.ops.fused.cuda_norm import norm_backward, norm_quantize
from lightning_fp8.ops.schema import NAMESPACE

for _op, _how_at in (
    (norm_quantize, 4),
    (norm_backward, None),
    (activation_quantize, 2),
    (activation_backward_quantize, 4),
):
    _registered = falls_back(_op, getattr(reference, _op.__name__), _how_at)  # type: ignore[arg-type]
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _registered)
