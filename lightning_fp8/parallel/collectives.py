"""Collectives of a tensor-parallel group: gathers of pieces, sums and amaxes.

They run asynchronously. The result is waited for when it is read, so that a GEMM can run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8 import ops

# torch 2.13 deprecates the second names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Pending = Callable[[], Tensor]
"""Waits for a collective, and returns its result."""


def start_gather(piece: Tensor, group: dist.ProcessGroup, dim: int) -> Pending:
    """Gather the pieces of all ranks along ``dim``. FP8 codes and E8M0 scales are sent as bytes."""
    ranks = dist.get_world_size(group)
    piece = piece.contiguous()
    whole = piece.new_empty((ranks, *piece.shape))
    work: Any = all_gather(_bytes(whole).flatten(0, 1), _bytes(piece), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        if dim == 0:
            return whole.flatten(0, 1)
        return torch.cat(_bytes(whole).unbind(0), dim).view(piece.dtype)

    return wait


def start_scatter_of_sum(parts: Tensor, group: dist.ProcessGroup, dim: int) -> Pending:
    """Reduce-scatter: this rank's piece, along ``dim``, of the sum of the ranks' ``parts``.

    Raises:
        ValueError: If ``dim`` is not divisible by the number of ranks.
    """
    ranks = dist.get_world_size(group)
    if parts.shape[dim] % ranks:
        raise ValueError(
            f"a sequence of {parts.shape[dim]} does not divide into {ranks} pieces, one for each tensor-parallel rank; "
            "pad it to a multiple"
        )
    pieces = torch.stack(parts.chunk(ranks, dim)) if dim else parts.contiguous().unflatten(0, (ranks, -1))
    piece = parts.new_empty(pieces.shape[1:])
    work = reduce_scatter(piece, pieces.flatten(0, 1), group=group, async_op=True)
    return _result(work, piece)


def start_sum(parts: Tensor, group: dist.ProcessGroup) -> Pending:
    """All-reduce: the sum of the ranks' ``parts``, which is overwritten."""
    parts = parts.contiguous()
    return _result(dist.all_reduce(parts, group=group, async_op=True), parts)


def amax_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``max |x|`` over all ranks, float32 ``[]``; must be called by every rank of the group."""
    amax = x.new_zeros((), dtype=torch.float32)
    ops.observe(x, amax)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def require_shared_scales(fp8_group: dist.ProcessGroup | None, group: dist.ProcessGroup) -> None:
    """Check that ranks that gather each other's codes share scales.

    Args:
        fp8_group: the ranks that share scales; None is all ranks.
        group: the ranks of a layer.

    Raises:
        ValueError: If a rank of ``group`` is not in ``fp8_group``.
    """
    if fp8_group is None or fp8_group is group:
        return
    sharing = dist.get_process_group_ranks(fp8_group)
    if missing := set(dist.get_process_group_ranks(group)) - set(sharing):
        raise ValueError(
            f"fp8_group has the ranks {sharing}, without {sorted(missing)} of a tensor-parallel layer. These gather "
            "each other's FP8 codes and must share scales: pass a group that contains them, or fp8_group=None"
        )


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


def _result(work: Any, result: Tensor) -> Pending:
    def wait() -> Tensor:
        work.wait()
        return result

    return wait
