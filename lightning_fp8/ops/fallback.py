"""Where kernels do not run: one warning says why, and the reference serves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.how import How, parsed
from lightning_fp8.ops.operands import Operands, Outputs

_without_kernels: set[torch.device] = set()


class NothingToDo(Exception):
    """The tensor is empty; the reference gives its results."""


def refuse_empty(shape: Sequence[int]) -> None:
    """Called by what plans.

    Raises:
        NothingToDo: ``shape`` holds no element.
    """
    if 0 in shape:
        raise NothingToDo


def falls_back(
    kernels_op: Callable[..., Any], reference_op: Callable[..., Any], how_at: int | None = None
) -> Callable[..., Any]:
    """``kernels_op``, or ``reference_op`` where the device runs no kernels or there is nothing to do.

    Args:
        how_at: which argument says how to cast; None if none does.
    """

    @wraps(kernels_op)
    def op(x: Tensor, *args: Any) -> Any:
        if x.is_cuda and torch._C._cuda_getDevice() != x.get_device():
            with torch.cuda.device(x.device):
                return op(x, *args)
        if not _without_kernels or x.device not in _without_kernels:
            try:
                return kernels_op(x, *args)
            except NothingToDo:
                pass
            except (ImportError, RuntimeError) as error:
                if not _is_kernel_error(error):
                    raise
                _without_kernels.add(x.device)
                warnings.warn(
                    f"FP8 kernels do not run on {x.device}: {error}. FP8 ops run as plain torch operations, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        results = reference_op(x, *args)
        if how_at is None:
            return results
        return (*_promised(results[:4], parsed(args[how_at - 1])), *results[4:])

    return op


def _is_kernel_error(error: Exception) -> bool:
    if isinstance(error, ImportError):
        return True
    from cuda_kernels.launch import KernelError

    return isinstance(error, KernelError)


def _promised(results: Sequence[Tensor], how: How) -> Outputs:
    """The reference's operands in the strides that these ops promise."""
    data, _, data_t, _ = results
    rows, columns = data.shape if how.rowwise else data_t.t().shape if how.columnwise else (0, 0)
    promised = Operands(data.device, how, rows, columns).allocate()
    for empty, result in zip(promised, results):
        kind = torch.uint8 if result.element_size() == 1 else result.dtype
        empty.view(kind).copy_(result.view(kind))
    return promised
