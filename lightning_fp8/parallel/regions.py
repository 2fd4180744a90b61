"""Differentiable collectives in high precision, for layers that compute with local tensors between them.

Each is a linear map, and its gradient is the adjoint map, another one of them: they have derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.parallel.collectives import start_gather, start_scatter_of_sum, start_sum
from lightning_fp8.parallel.function import Parallel

Map = Callable[[Tensor], Tensor]


def gathered(piece: Tensor, parallel: Parallel) -> Tensor:
    """Gather the pieces of all ranks; the gradient is reduce-scattered."""
    return _mapped(piece, partial(_gather, parallel), partial(_scatter_of_sum, parallel))


def sum_gradients(*parameters: Tensor | None, group: dist.ProcessGroup) -> list[Any]:
    """Parameters that each rank applies to its piece of a tensor; gradients are summed over the ranks, in float32."""
    summed = partial(_sum, group, dtype=torch.float32)
    return [None if each is None else _mapped(each, _copy, summed) for each in parameters]


def high_precision_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parallel: Parallel) -> Tensor:
    """``x wᵀ + bias`` of a tensor-parallel layer, as :func:`~lightning_fp8.parallel.function.parallel_linear`.

    Args:
        x, weight, bias: this rank's.
        parallel: how the layer is divided.
    """
    group = parallel.group
    if parallel.mode == "column":
        x = _mapped(x, _copy, partial(_sum, group)) if parallel.sequence is None else gathered(x, parallel)
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    if parallel.sequence is None:
        y = _mapped(y, partial(_sum, group), _copy)
    else:
        y = _mapped(y, partial(_scatter_of_sum, parallel), partial(_gather, parallel))
        (bias,) = sum_gradients(bias, group=group)
    return y if bias is None else y + bias.to(y.dtype)


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, adjoint: Map) -> Tensor:
        ctx.run, ctx.adjoint = run, adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _mapped(gradient, ctx.adjoint, ctx.run), None, None


def _mapped(x: Tensor, run: Map, adjoint: Map) -> Tensor:
    """A linear map of the ranks' tensors, whose gradient is its adjoint's."""
    y: Tensor = _Mapped.apply(x, run, adjoint)
    return y


def _gather(parallel: Parallel, piece: Tensor) -> Tensor:
    return start_gather(piece, parallel.group, parallel.sequence)()  # type: ignore[arg-type]


def _scatter_of_sum(parallel: Parallel, parts: Tensor) -> Tensor:
    return start_scatter_of_sum(parts, parallel.group, parallel.sequence)()  # type: ignore[arg-type]


def _sum(group: dist.ProcessGroup, parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the ranks' tensors, on all ranks, added in ``dtype``."""
    copy = parts.to(dtype or parts.dtype, copy=True, memory_format=torch.contiguous_format)
    return start_sum(copy, group)().to(parts.dtype)


def _copy(x: Tensor) -> Tensor:
    """The tensor, which is equal on all ranks."""
    return x.view_as(x)
