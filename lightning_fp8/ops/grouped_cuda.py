"""The cast of experts on CUDA tensors, all of them in one launch."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.cast import Outputs
from lightning_fp8.ops.cast_cuda import planned_cast, tensor_loaders
from lightning_fp8.ops.grouped import quantize_experts_op, reference_experts


def _reference(w: Tensor, experts: int, *args: object) -> Outputs:
    return reference_experts(w.unflatten(0, (experts, w.shape[0] // experts)), *args)  # type: ignore[arg-type]


_quantize, _plan = planned_cast("quantize_experts", _reference, lambda key, _: tensor_loaders(key), of_experts=True)


def quantize_experts_on_cuda(w: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Outputs:
    """Cast each of ``w [E, N, K]``."""
    return _quantize(w.flatten(0, 1), w.shape[0], cast, scale, amax)  # type: ignore[no-any-return]


quantize_experts_op.implement("cuda", quantize_experts_on_cuda)
