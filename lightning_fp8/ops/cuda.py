"""The ops on CUDA tensors: plan once for tensors that lie alike, then allocate and start :mod:`cuda_kernels`.

Where kernels cannot run (no numba-cuda, a driver or a card too old) one warning says why, and the reference serves.
Nothing here waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops import reference
from lightning_fp8.ops.how import How, parsed
from lightning_fp8.ops.operands import NAMES, Operands, Outputs, allocator, comes_in_vectors
from lightning_fp8.ops.schema import NAMESPACE
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.launch import Argument, Launch
    from cuda_kernels.tile import Source

KEPT_PLANS = 4096
"""Of each kind: one for every way that tensors of a model lie."""

_without_kernels: set[torch.device] = set()


# --- Plans ------------------------------------------------------------------------------------------------------------


class NothingToDo(Exception):
    """The tensor is empty; the reference gives its results."""


def refuse_empty(shape: Sequence[int]) -> None:
    """Called by what plans.

    Raises:
        NothingToDo: ``shape`` holds no element.
    """
    if 0 in shape:
        raise NothingToDo


class Task(NamedTuple):
    """``how`` to cast, and whether ``scale``, ``seen`` and ``counts`` are given."""

    how: How
    given: bool
    observes: bool
    counts: bool


class Reading(NamedTuple):
    """How kernels read a tensor.

    Attributes:
        source: what gives them its values.
        quads: whether four elements load at once.
        pitch, rows, columns: of the tensor.
        blocks: how many run side by side, each taking every n-th tile.
    """

    source: Source
    quads: bool
    pitch: int
    rows: int
    columns: int
    blocks: int


def reading_of(
    device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int
) -> Reading | None:
    """How to read a tensor that lies so, its address taken modulo 16; None if it has to be made contiguous first."""
    from cuda_kernels import tile

    refuse_empty(shape)
    rows, columns = shape
    if strides[1] != 1 and columns != 1:
        return None
    quads = comes_in_vectors(columns, strides[0], address, dtype.itemsize, 4)
    source = tile.tensor_source(NAMES[dtype], quads)
    return Reading(source, quads, strides[0], rows, columns, blocks_of(device, rows, columns))


def blocks_of(device: torch.device, rows: int, columns: int) -> int:
    """How many blocks run side by side, each taking every n-th tile of ``[rows, columns]``."""
    from cuda_kernels import launch, tile

    return min(tile.tiles(rows, columns), 4 * launch.multiprocessors(device))


class CastPlan:
    """How to cast values ``[rows, columns]`` that a source gives.

    Args:
        source: of the values; ``storing``: of the same for the kernel that casts, if it is another.

    Attributes:
        at: what launches take for a tensor.
    """

    def __init__(
        self,
        device: torch.device,
        source: Source,
        rows: int,
        columns: int,
        task: Task,
        storing: Source | None = None,
    ) -> None:
        from cuda_kernels import launch, tile

        how = task.how
        if task.given:
            how.refuse_scale()
        self.at: Callable[[Tensor], Argument] = launch.address_on(device)
        self.device, self.rows, self.columns = device, rows, columns
        self.operands, self._allocate = Operands(device, how, rows, columns), allocator(device)
        # In place of a given scale of 0 the tensor's own is taken as delayed scaling does, without a recipe's options.
        scaling = (0, 0.0) if task.given else (int(how.power_2), how.epsilon)
        self._values, self._fp8, self._usage = storing or source, how.float8.name.lower(), (how.rowwise, how.columnwise)
        kernel, *numbers = self._plan(source, task, scaling)
        self._cast = launch.Launch(kernel, tile.tiles(rows, columns), numbers, device)

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        """The kernel that casts and its numbers; plans the launches before it."""
        raise NotImplementedError

    def __call__(
        self,
        words: Sequence[Argument],
        scale: Tensor | None,
        seen: Tensor | None,
        counts: Tensor | None,
        storing: Sequence[Argument] | None = None,
    ) -> Outputs:
        """Cast; ``words``: what the source takes; ``storing``: what that of the kernel that casts takes."""
        raise NotImplementedError


class TensorPlan(CastPlan):
    """One scale for all; the tensor's own amax is found first where it may be needed."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels import amax, launch, quantize

        blocks = blocks_of(self.device, self.rows, self.columns)
        numbers = self.rows, self.columns
        self._amax: Launch | None = None
        if not (task.given and task.how.nonzero):
            self._amax = launch.Launch(amax.amax_kernel(source, False), blocks, numbers, self.device)
        kernel = quantize.quantize_tensor_kernel(self._values, self._fp8, *self._usage, task.observes, task.counts)
        pitch, _, pitch_t, _ = self.operands.pitches
        return kernel, *numbers, blocks, *scaling, pitch, pitch_t

    def __call__(
        self,
        words: Sequence[Argument],
        scale: Tensor | None,
        seen: Tensor | None,
        counts: Tensor | None,
        storing: Sequence[Argument] | None = None,
    ) -> Outputs:
        at, amax = self.at, self._amax
        outputs = data, scale_inv, data_t, _ = self.operands.allocate()
        given = 0 if scale is None else at(scale)
        own: Argument = 0
        if amax is not None:
            partials = self._allocate((amax.blocks,), (1,), torch.float32)
            own = at(partials)
            amax(*words, given, own)  # returns at once where a scale is given, unless the scale is 0
        self._cast(
            *(storing or words), given, own, 0 if seen is None else at(seen), 0 if counts is None else at(counts),
            at(data), at(scale_inv), at(data_t),
        )  # fmt: skip
        return outputs


class RowPlan(CastPlan):
    """One scale for each row, and in the transposed operand for each column, whose amaxes are found first."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels import amax, launch, quantize, tile

        numbers = self.rows, self.columns
        kernel = amax.row_amax_kernel(source, *self._usage)
        self._amax, self._zero = launch.Launch(kernel, tile.tiles(*numbers), numbers, self.device), launch.zero
        kernel = quantize.quantize_rows_kernel(self._values, self._fp8, *self._usage, task.counts)
        return kernel, *numbers, *scaling, *self.operands.pitches

    def __call__(
        self,
        words: Sequence[Argument],
        scale: Tensor | None,
        seen: Tensor | None,
        counts: Tensor | None,
        storing: Sequence[Argument] | None = None,
    ) -> Outputs:
        at = self.at
        outputs = data, scale_inv, data_t, scale_inv_t = self.operands.allocate()
        amaxes = self._allocate((self.rows + self.columns,), (1,), torch.float32)
        self._zero(amaxes)
        both = at(amaxes), amaxes.data_ptr() + 4 * self.rows
        self._amax(*words, *both)
        counted = 0 if counts is None else at(counts)
        self._cast(*(storing or words), *both, counted, at(data), at(scale_inv), at(data_t), at(scale_inv_t))
        return outputs


class BlockPlan(CastPlan):
    """One scale for each block, from the block itself."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels.quantize_blocks import quantize_blocks_kernel

        kernel = quantize_blocks_kernel(self._values, self._fp8, task.how.layout.value, *self._usage, task.counts)
        return kernel, self.rows, self.columns, *scaling, *self.operands.pitches

    def __call__(
        self,
        words: Sequence[Argument],
        scale: Tensor | None,
        seen: Tensor | None,
        counts: Tensor | None,
        storing: Sequence[Argument] | None = None,
    ) -> Outputs:
        at = self.at
        outputs = data, scale_inv, data_t, scale_inv_t = self.operands.allocate()
        counted = 0 if counts is None else at(counts)
        self._cast(*(storing or words), counted, at(data), at(scale_inv), at(data_t), at(scale_inv_t))
        return outputs


def plan_of(
    device: torch.device, source: Source, rows: int, columns: int, task: Task, storing: Source | None = None
) -> CastPlan:
    """The plan for the layout that the task says; see :class:`CastPlan`."""
    kind = {Layout.TENSOR: TensorPlan, Layout.ROW: RowPlan}.get(task.how.layout, BlockPlan)
    return kind(device, source, rows, columns, task, storing)


# --- Ops --------------------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor, how: str, scale: Tensor | None = None, seen: Tensor | None = None, counts: Tensor | None = None
) -> Outputs:
    address = x.data_ptr() % 16
    given, observes, counted = scale is not None, seen is not None, counts is not None
    planned = _quantize_plan(x.device, x.dtype, x.shape, x.stride(), address, how, given, observes, counted)
    if planned is None:
        return quantize(x.contiguous(), how, scale, seen, counts)
    plan, pitch = planned
    return plan((plan.at(x), pitch), scale, seen, counts)


@lru_cache(KEPT_PLANS)
def _quantize_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> tuple[CastPlan, int] | None:
    """The plan, and the pitch of x; None as :func:`reading_of`."""
    reading = reading_of(device, dtype, shape, strides, address)
    if reading is None:
        return None
    source, _, pitch, rows, columns, _ = reading
    return plan_of(device, source, rows, columns, Task(parsed(how), given, observes, counts)), pitch


def observe(x: Tensor, seen: Tensor) -> None:
    planned = _observe_plan(x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
    if planned is None:
        return observe(x.contiguous(), seen)
    start, at, pitch = planned
    start(at(x), pitch, 0, at(seen))
    return None


@lru_cache(KEPT_PLANS)
def _observe_plan(
    device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int
) -> tuple[Launch, Callable[[Tensor], Argument], int] | None:
    from cuda_kernels import amax, launch

    reading = reading_of(device, dtype, shape, strides, address)
    if reading is None:
        return None
    source, _, pitch, rows, columns, blocks = reading
    start = launch.Launch(amax.amax_kernel(source, True), blocks, (rows, columns), device)
    return start, launch.address_on(device), pitch


def update_scales(
    seen: Tensor, window: Tensor, scale: Tensor, fp8_max: Tensor, margin: float, algorithm: str, recompute: bool
) -> None:
    start, at = _update_plan(seen.device, window.shape, margin, algorithm, recompute)
    start(at(seen), at(window), at(scale), at(fp8_max))


@lru_cache(KEPT_PLANS)
def _update_plan(
    device: torch.device, window: Sequence[int], margin: float, algorithm: str, recompute: bool
) -> tuple[Launch, Callable[[Tensor], Argument]]:
    from cuda_kernels import launch, scaling

    refuse_empty(window)
    length, n = window
    kernel = scaling.update_scales_kernel(algorithm == "most_recent", recompute)
    start = launch.Launch(kernel, -(-n // scaling.COLUMNS), (2.0**margin, length, n), device)
    return start, launch.address_on(device)


# --- Where kernels do not run -----------------------------------------------------------------------------------------


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
                    f"FP8 kernels do not run on {x.device}: {error}. Casts run as plain torch operations, slower.",
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


for _op, _how_at in ((quantize, 1), (observe, None), (update_scales, None)):
    _registered = falls_back(_op, getattr(reference, _op.__name__), _how_at)
    torch.library.impl(f"{NAMESPACE}::{_op.__name__}", "cuda", _registered)
