"""Collectives in high precision, with their gradients, between which layers compute on the tensors of one rank.

Each one's gradient is another of them, so that they have derivatives of any order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.parallel.collectives import SumGradient, start_gather, start_scatter_of_sum, start_sum
from lightning_fp8.parallel.function import Parallel


def gathered(piece: Tensor, parallel: Parallel) -> Tensor:
    """The pieces of all ranks one after the other; the gradient is this rank's piece of the sum of all ranks'."""
    whole: Tensor = _Gather.apply(piece, parallel)
    return whole


def sum_gradients(*parameters: Tensor | None, parallel: Parallel) -> list[Any]:
    """Parameters that each rank applies to its own piece of a tensor; their gradients are summed over the ranks."""
    return [None if each is None else SumGradient.apply(each, parallel.group) for each in parameters]


def high_precision_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
    """``x wᵀ + bias`` of a layer that is cut over ranks, as :func:`~lightning_fp8.parallel.function.parallel_linear`.

    Args:
        x, weight, bias: this rank's.
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
    """This rank's piece of the sum of the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, parallel: Parallel) -> Tensor:
        assert parallel.sequence is not None
        ctx.parallel = parallel
        return start_scatter_of_sum(parts, parallel.group, parallel.sequence)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Gather.apply(gradient, ctx.parallel), None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors, which all of them go on with."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return start_sum(parts.clone(memory_format=torch.contiguous_format), parallel.group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Copy.apply(gradient, ctx.parallel), None


class _Copy(torch.autograd.Function):
    """A tensor that all ranks have, which each goes on with in its own way; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Sum.apply(gradient, ctx.parallel), None
