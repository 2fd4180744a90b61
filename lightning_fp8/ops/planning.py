"""What an op does with tensors that lie alike, planned once; where kernels do not run, the reference serves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.how import How, parsed
from lightning_fp8.ops.operands import Operands, Outputs

Op = Callable[..., Any]

KEPT_PLANS = 4096
"""Of each kind: one for every way that tensors of a model lie."""

_without_kernels: set[torch.device] = set()
_planners: list[Any] = []


class NothingToDo(Exception):
    """The tensor is empty; the reference gives its results."""


def refuse_empty(shape: Sequence[int]) -> None:
    """Called by what plans.

    Raises:
        NothingToDo: ``shape`` holds no element.
    """
    if 0 in shape:
        raise NothingToDo


def current_device() -> int:
    """The index of the current CUDA device, faster than ``torch.cuda.current_device``; it is initialized."""
    return torch._C._cuda_getDevice()


def planned(
    reference_op: Op, how_at: int | None = None, without_kernels: Callable[..., Op] | None = None
) -> Callable[[Callable[..., Op]], Callable[..., Op]]:
    """Keeps what a planner gives: ``plan(device, *lies) -> op`` becomes ``(device, current, *lies) -> op``.

    ``op`` has the arguments of ``reference_op`` and is for tensors on ``device`` that lie as ``lies`` says. ``current``
    is False, or for a CUDA device the index of the current one. Where the device runs no kernels, or there is nothing
    to do, ``op`` is ``reference_op``.

    Args:
        how_at: which argument says how to cast; None if none does.
        without_kernels: what plans where the device runs none, if not all is then the reference's.
    """
    otherwise = reference_op if how_at is None else _lying_as_promised(reference_op, how_at)

    def decorate(plan: Callable[..., Op]) -> Callable[..., Op]:
        @lru_cache(KEPT_PLANS)
        @wraps(plan)
        def op_for(device: torch.device, current: int | bool, *lies: Hashable) -> Op:
            if current is not False and current != device.index:
                return _elsewhere(op_for, device, lies)
            plans = (plan, without_kernels) if runs_kernels(device) else (without_kernels,)
            for each in filter(None, plans):
                try:
                    return each(device, *lies)
                except NothingToDo:
                    return otherwise
                except (ImportError, RuntimeError) as error:
                    if not _is_kernel_error(error):
                        raise
                    _note_without_kernels(device, error)
            return otherwise

        _planners.append(op_for)
        return op_for

    return decorate


def runs_kernels(device: torch.device) -> bool:
    """Whether none has failed to be made there."""
    return device not in _without_kernels


def forget() -> None:
    """Plan anew from now on, also where kernels did not run."""
    _without_kernels.clear()
    for planner in _planners:
        planner.cache_clear()


def _note_without_kernels(device: torch.device, error: Exception) -> None:
    if runs_kernels(device):
        _without_kernels.add(device)
        warnings.warn(
            f"FP8 kernels do not run on {device}: {error}. FP8 ops run as plain torch operations, slower.",
            RuntimeWarning,
            stacklevel=4,
        )


def _elsewhere(op_for: Callable[..., Op], device: torch.device, lies: Sequence[Hashable]) -> Op:
    """The op, with ``device`` the current one meanwhile."""

    def op(*args: Any) -> Any:
        with torch.cuda.device(device):
            return op_for(device, device.index, *lies)(*args)

    return op


def _lying_as_promised(reference_op: Op, how_at: int) -> Op:
    """The reference, its operands in the strides that these ops promise."""

    def op(*args: Any) -> Any:
        results = reference_op(*args)
        return (*_promised(results[:4], parsed(args[how_at])), *results[4:])

    return op


def _is_kernel_error(error: Exception) -> bool:
    if isinstance(error, ImportError):
        return True
    from cuda_kernels.launch import KernelError

    return isinstance(error, KernelError)


def _promised(results: Sequence[Tensor], how: How) -> Outputs:
    data, _, data_t, _ = results
    rows, columns = data.shape if how.rowwise else data_t.t().shape if how.columnwise else (0, 0)
    promised = Operands(data.device, how, rows, columns).allocate()
    for empty, result in zip(promised, results):
        kind = torch.uint8 if result.element_size() == 1 else result.dtype
        empty.view(kind).copy_(result.view(kind))
    return promised
