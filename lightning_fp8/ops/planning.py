"""What an op does with tensors that lie alike, planned once; where kernels do not run, the reference serves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.host.launch import NoKernels
from cuda_kernels.kernel import KernelError
from lightning_fp8.ops.config import QuantizeConfig, parse_quantize_config
from lightning_fp8.ops.operands import Operands, Outputs

Op = Callable[..., Any]

KEPT_PLANS = 4096
"""Of each kind: one for every way that tensors of a model lie."""

_without_kernels: set[torch.device] = set()
_noted: set[tuple[torch.device, str]] = set()
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
    reference_op: Op, config_arg: int | None = None, without_kernels: Callable[..., Op] | None = None
) -> Callable[[Callable[..., Op]], Callable[..., Op]]:
    """Keeps what a planner gives: ``plan(device, *lies) -> op`` becomes ``(device, current, *lies) -> op``.

    ``op`` has the arguments of ``reference_op`` and is for tensors on ``device`` that lie as ``lies`` says. ``current``
    is False, or for a CUDA device the index of the current one. Where the device runs no kernels, or there is nothing
    to do, ``op`` is ``reference_op``.

    Args:
        config_arg: which argument says how to cast; None if none does.
        without_kernels: what plans where the device runs none, if not all is then the reference's.
    """
    otherwise = reference_op if config_arg is None else _lying_as_promised(reference_op, config_arg)

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
                except KernelError as error:
                    _note(device, error)
            return otherwise

        _planners.append(op_for)
        return op_for

    return decorate


def runs_kernels(device: torch.device) -> bool:
    """Whether any does, as far as was seen."""
    return device not in _without_kernels


def forget() -> None:
    """Plan anew from now on, also where kernels did not run."""
    _without_kernels.clear()
    _noted.clear()
    for planner in _planners:
        planner.cache_clear()


def _note(device: torch.device, error: KernelError) -> None:
    """Say once why an op runs without its kernel there; where none runs, ask for none again."""
    if isinstance(error, NoKernels):
        _without_kernels.add(device)
    if (device, str(error)) not in _noted:
        _noted.add((device, str(error)))
        what = "FP8 kernels do" if isinstance(error, NoKernels) else "An FP8 kernel does"
        warnings.warn(
            f"{what} not run on {device}: {error}. What needs it runs as plain torch operations, slower.",
            RuntimeWarning,
            stacklevel=4,
        )


def _elsewhere(op_for: Callable[..., Op], device: torch.device, lies: Sequence[Hashable]) -> Op:
    """The op, with ``device`` the current one meanwhile."""

    def op(*args: Any) -> Any:
        with torch.cuda.device(device):
            return op_for(device, device.index, *lies)(*args)

    return op


def _lying_as_promised(reference_op: Op, config_arg: int) -> Op:
    """The reference, its operands in the strides that these ops promise."""

    def op(*args: Any) -> Any:
        results = reference_op(*args)
        return (*_promised(results[:4], parse_quantize_config(args[config_arg])), *results[4:])

    return op


def _promised(results: Sequence[Tensor], config: QuantizeConfig) -> Outputs:
    data, _, data_t, _ = results
    rows, columns = data.shape if config.rowwise else data_t.t().shape if config.columnwise else (0, 0)
    promised = Operands(data.device, config, rows, columns).allocate()
    for empty, result in zip(promised, results):
        kind = torch.uint8 if result.element_size() == 1 else result.dtype
        empty.view(kind).copy_(result.view(kind))
    return promised
