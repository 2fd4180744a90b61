"""Differentiable collectives in high precision, for layers that compute with local tensors between them.

The gradient of each is another one of them, so they have derivatives of any order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.parallel.collectives import SumGradient, start_gather, start_scatter_of_sum, start_sum
from lightning_fp8.parallel.function import Parallel


def gathered(piece: Tensor, parallel: Parallel) -> Tensor:
    """Gather the pieces of all ranks; the gradient is reduce-scattered."""
    whole: Tensor = _Gather.apply(piece, parallel)
    return whole


def sum_gradients(*parameters: Tensor | None, parallel: Parallel) -> list[Any]:
    """Parameters that each rank applies to its piece of a tensor; their gradients are summed over the ranks."""
    return [None if each is None else SumGradient.apply(each, parallel.group) for each in parameters]


def high_precision_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
    """``x wᵀ + bias`` of a tensor-parallel layer, as :func:`~lightning_fp8.parallel.function.parallel_linear`.

    Args:
        x, weight, bias: this rank's.
        parallel: how the layer is divided.
    """
    if parallel.mode == "column":
        x = _Copy.apply(x, parallel) if parallel.sequence is None else gathered(x, parallel)
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    if parallel.sequence is None:
        y = _Sum.apply(y, parallel)
    else:
        y = _ScatterSum.apply(y, parallel)
        (bias,) = sum_gradients(bias, parallel=parallel)
    return y if bias is None else y + bias.to(y.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, parallel: Parallel) -> Tensor:
        assert parallel.sequence is not None
        ctx.parallel = parallel
        return start_gather(piece, parallel.group, parallel.sequence)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _ScatterSum.apply(gradient, ctx.parallel), None


class _ScatterSum(torch.autograd.Function):
    """This rank's piece of the sum of the ranks' tensors (reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, parallel: Parallel) -> Tensor:
        assert parallel.sequence is not None
        ctx.parallel = parallel
        return start_scatter_of_sum(parts, parallel.group, parallel.sequence)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.parallel), None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, on all ranks (all-reduce)."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return start_sum(parts.clone(memory_format=torch.contiguous_format), parallel.group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Copy.apply(gradient, ctx.parallel), None


class _Copy(torch.autograd.Function):
    """Identity of a tensor that is equal on all ranks; sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.parallel), None
