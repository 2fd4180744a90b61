"""The cast of experts on CUDA tensors, all of them in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fp8.ops.cast import Outputs
from lightning_fp8.ops.cast_cuda import planned_cast, tensor_loaders
from lightning_fp8.ops.grouped import quantize_experts_op, reference_experts


def _reference(w: Tensor, experts: int, *args: Any) -> Outputs:
    return reference_experts(w.unflatten(0, (experts, len(w) // experts)), *args)


_quantize, _ = planned_cast("quantize_experts", _reference, lambda key, _: tensor_loaders(key), of_experts=True)
quantize_experts_op.implement("cuda", lambda w, *args: _quantize(w.flatten(0, 1), len(w), *args))
