"""How kernels cast values that lie alike: planned once, then allocated and started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.config import NAMES, QuantizeConfig, parse_quantize_config
from lightning_fp8.ops.given import Checked, Lie, compact, lie_of, require_beside_a_cast
from lightning_fp8.ops.operands import Operands, Outputs, allocator, comes_in_vectors
from lightning_fp8.ops.planning import Op, current_device, planned, refuse_empty
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.device.tile import Source
    from cuda_kernels.host.launch import Argument

    Words = Sequence[Argument]
    Start = Callable[..., None]

Given = Tensor | None


class Task(NamedTuple):
    """``config`` to cast, and whether ``scale``, ``amax`` and ``counts`` are given."""

    config: QuantizeConfig
    given: bool
    observes: bool
    counts: bool


def task_of(device: torch.device, config: str, given: bool, observes: bool, counts: Lie | None) -> Task:
    """The task of a cast on ``device``.

    Raises:
        TypeError, ValueError: ``counts`` do not fit.
    """
    require_beside_a_cast(device, None, None, counts)
    return Task(parse_quantize_config(config), given, observes, counts is not None)


class Values(NamedTuple):
    """What one tensor gives kernels to cast: ``[rows, columns]``, by a source.

    Attributes:
        stride: of the tensor's rows.
        wide: the source of the same in vectors of 16 bytes, if it comes in them; see ``tile.Source.vector``.
    """

    source: Source
    stride: int
    rows: int
    columns: int
    wide: Source | None = None


def values_of(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int) -> Values | None:
    """A tensor's own, its address taken modulo 16; None if it has to be made contiguous first."""
    from cuda_kernels.device import tile

    refuse_empty(shape)
    rows, columns = shape
    if strides[1] != 1 and columns != 1:
        return None
    vector = next(n for n in (8, 4, 1) if n == 1 or comes_in_vectors(columns, strides[0], address, dtype.itemsize, n))
    source = tile.tensor_source(NAMES[dtype], min(vector, 4))
    wide = tile.tensor_source(NAMES[dtype], 8) if vector == 8 and dtype.itemsize == 2 else None
    return Values(source, strides[0], rows, columns, wide)


def sources_of(values: Values, config: QuantizeConfig) -> tuple[Source, Source]:
    """What finds amaxes, and what casts: in the widest vectors, but where columns, or 128 of a row, share a scale."""
    narrow, wide = values.source, values.wide or values.source
    if config.layout is Layout.BLOCK_1X128:
        return narrow, narrow
    return narrow if config.layout is Layout.ROW else wide, narrow if config.columnwise else wide


def blocks_of(device: torch.device, rows: int, columns: int) -> int:
    """How many blocks run side by side, each taking every n-th tile of ``[rows, columns]``."""
    from cuda_kernels.device import tile
    from cuda_kernels.host import launch

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
        from cuda_kernels.device import tile
        from cuda_kernels.host import launch

        config = task.config
        if task.given:
            config.refuse_scale()
        self.at: Callable[[Tensor], Argument] = launch.address_on(device)
        self.device, self.rows, self.columns = device, rows, columns
        self.operands, self._allocate = Operands(device, config, rows, columns), allocator(device)
        # In place of a given scale of 0 the tensor's own is taken as delayed scaling does, without a recipe's options.
        scaling = (0, 0.0) if task.given else (int(config.power_2), config.epsilon)
        self._values, self._fp8, self._usage = (
            storing or source,
            config.float8.name.lower(),
            (config.rowwise, config.columnwise),
        )
        kernel, *numbers = self._plan(source, task, scaling)
        self._cast = launch.Launch(kernel, tile.tiles(rows, columns), numbers, device).start

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        """The kernel that casts and its numbers; plans the launches before it."""
        raise NotImplementedError

    def cast(self, words: Words, scale: Given, amax: Given, counts: Given, storing: Words | None = None) -> Outputs:
        """Cast; ``words``: what the source takes; ``storing``: what that of the kernel that casts takes."""
        raise NotImplementedError


class TensorPlan(CastPlan):
    """One scale for all; the tensor's own amax is found first where it may be needed."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels.casts import quantize
        from cuda_kernels.casts.amax import amax_kernel
        from cuda_kernels.host import launch

        self._checked = Checked(self.device)
        blocks = blocks_of(self.device, self.rows, self.columns)
        numbers = self.rows, self.columns
        self._find_amax: Start | None = None
        self._partials = (blocks,), (1,), torch.float32
        if not (task.given and task.config.nonzero):
            self._find_amax = launch.Launch(amax_kernel(source, False), blocks, numbers, self.device).start
        kernel = quantize.quantize_tensor_kernel(self._values, self._fp8, *self._usage, task.observes, task.counts)
        stride, _, stride_t, _ = self.operands.strides
        return kernel, *numbers, blocks, *scaling, stride, stride_t

    def cast(self, words: Words, scale: Given, amax: Given, counts: Given, storing: Words | None = None) -> Outputs:
        at, find_amax, known = self.at, self._find_amax, self._checked.known
        given, observed = 0 if scale is None else at(scale), 0 if amax is None else at(amax)
        if given not in known or observed not in known:
            require_beside_a_cast(self.device, lie_of(scale), lie_of(amax), None)
            self._checked.keep(given, observed)
        outputs = data, scale_inv, data_t, _ = self.operands.allocate()
        own: Argument = 0
        if find_amax is not None:
            partials = self._allocate(*self._partials)
            own = at(partials)
            find_amax(*words, given, own)  # returns at once where a scale is given, unless the scale is 0
        self._cast(
            *(storing or words), given, own, observed, 0 if counts is None else at(counts),
            at(data), at(scale_inv), at(data_t),
        )  # fmt: skip
        return outputs


class RowPlan(CastPlan):
    """One scale for each row, and in the transposed operand for each column, whose amaxes are found first."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels.casts import quantize
        from cuda_kernels.casts.amax import row_amax_kernel
        from cuda_kernels.device import tile
        from cuda_kernels.host import launch

        numbers = self.rows, self.columns
        kernel = row_amax_kernel(source, *self._usage)
        self._find_amax = launch.Launch(kernel, tile.tiles(*numbers), numbers, self.device).start
        self._amaxes, self._of_columns = ((sum(numbers),), (1,), torch.float32), 4 * self.rows
        self._zero = launch.zeroing(self.device, sum(numbers))
        kernel = quantize.quantize_rows_kernel(self._values, self._fp8, *self._usage, task.counts)
        return kernel, *numbers, *scaling, *self.operands.strides

    def cast(self, words: Words, scale: Given, amax: Given, counts: Given, storing: Words | None = None) -> Outputs:
        at = self.at
        outputs = data, scale_inv, data_t, scale_inv_t = self.operands.allocate()
        amaxes = self._allocate(*self._amaxes)
        of_rows, of_columns = at(amaxes), amaxes.data_ptr() + self._of_columns
        self._zero(of_rows)
        self._find_amax(*words, of_rows, of_columns)
        counted = 0 if counts is None else at(counts)
        self._cast(
            *(storing or words), of_rows, of_columns, counted,
            at(data), at(scale_inv), at(data_t), at(scale_inv_t),
        )  # fmt: skip
        return outputs


class BlockPlan(CastPlan):
    """One scale for each block, from the block itself."""

    def _plan(self, source: Source, task: Task, scaling: tuple[int, float]) -> tuple[Any, ...]:
        from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel

        kernel = quantize_blocks_kernel(self._values, self._fp8, task.config.layout.value, *self._usage, task.counts)
        return kernel, self.rows, self.columns, *scaling, *self.operands.strides

    def cast(self, words: Words, scale: Given, amax: Given, counts: Given, storing: Words | None = None) -> Outputs:
        at = self.at
        outputs = data, scale_inv, data_t, scale_inv_t = self.operands.allocate()
        counted = 0 if counts is None else at(counts)
        self._cast(*(storing or words), counted, at(data), at(scale_inv), at(data_t), at(scale_inv_t))
        return outputs


def plan_of(
    device: torch.device, source: Source, rows: int, columns: int, task: Task, storing: Source | None = None
) -> CastPlan:
    """The plan for the layout that the task says; see :class:`CastPlan`."""
    kind = {Layout.TENSOR: TensorPlan, Layout.ROW: RowPlan}.get(task.config.layout, BlockPlan)
    return kind(device, source, rows, columns, task, storing)


def casting(reference_op: Op, values: Callable[..., Values | None]) -> Op:
    """An op ``(x, config, scale, amax, counts) -> operands`` that casts what ``values(config, *lies)`` says of x.

    ``lies``: x's dtype, shape, strides, and address modulo 16. Where there are no values x is made contiguous first.
    """

    @planned(reference_op, config_arg=1)
    def plan(
        device: torch.device,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        address: int,
        config: str,
        given: bool,
        observes: bool,
        counts: Lie | None,
    ) -> Op:
        task = task_of(device, config, given, observes, counts)
        found = values(config, dtype, shape, strides, address)
        if found is None:
            return lambda x, *args: op(x.contiguous(), *args)
        stride = found.stride
        source, storing = sources_of(found, task.config)
        made = plan_of(device, source, found.rows, found.columns, task, storing)
        at, cast = made.at, made.cast
        return lambda x, config, scale, amax, counts: cast((at(x), stride), scale, amax, counts)

    @wraps(reference_op)
    def op(x: Tensor, config: str, scale: Given = None, amax: Given = None, counts: Given = None) -> Outputs:
        planned_op = plan(
            x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), x.data_ptr() % 16,
            config, scale is not None, amax is not None, None if counts is None else compact("counts", counts),
        )  # fmt: skip
        return planned_op(x, config, scale, amax, counts)

    return op
