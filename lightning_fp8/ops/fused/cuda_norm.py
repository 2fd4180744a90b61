"""Normalizations on CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.config import DTYPES, NAMES
from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.parts import Place, Results, place_of
from lightning_fp8.ops.fused.schema import NormConfig, parse_norm_config
from lightning_fp8.ops.given import (
    Checked,
    Lie,
    compact,
    lie_of,
    require_beside_a_cast,
    require_beside_a_norm,
)
from lightning_fp8.ops.operands import Operands, allocator
from lightning_fp8.ops.planning import current_device, planned
from lightning_fp8.ops.plans import Task, plan_of, task_of
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.device.rows import RowLayout
    from cuda_kernels.host.launch import Argument
    from cuda_kernels.norm.statistics import Norm


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    op = _norm_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), addresses % 16, weight.dtype,
        bias is not None, config, scale is not None, amax is not None,
        None if counts is None else compact("counts", counts),
    )  # fmt: skip
    return op(x, weight, bias, config, scale, amax, counts)


class _Input(NamedTuple):
    """What to normalize: ``rows`` that lie at ``place``, whose address says the weight's and bias's alignment too."""

    device: torch.device
    norm: Norm
    kind: NormConfig
    place: Place
    rows: int

    def comes_in(self, elements: int, size: int | None = None) -> bool:
        """Whether the rows, weight and bias are whole vectors; as :meth:`Place.comes_in`."""
        weight = self.place._replace(dtype=DTYPES[self.norm.weight_dtype], stride=0)
        return self.place.comes_in(elements, size) and weight.comes_in(elements, size)

    @property
    def spread(self) -> RowLayout | None:
        """How a row fits into the registers of its threads, if it does."""
        from cuda_kernels.device.rows import cast_row_layout

        return cast_row_layout(self.norm.dtype, self.place.columns) if self.comes_in(8, 16) else None


class _NormPlan:
    """Normalizes; what its subclasses share."""

    def __init__(self, of: _Input) -> None:
        from cuda_kernels.host import launch

        self._at, self._allocate = launch.address_on(of.device), allocator(of.device)
        self._stride, self._offset = of.place.stride, int(of.kind.zero_centered)
        self._statistics = (of.kind.statistics, of.rows), (of.rows, 1), torch.float32
        self._checked, self._device, self._columns = Checked(of.device), of.device, (of.place.columns,)

    def _addresses(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None, amax: Tensor | None
    ) -> tuple[Argument, ...]:
        """What launches take for these, once they were found to fit."""
        at = self._at
        addresses = (
            at(weight), 0 if bias is None else at(bias), 0 if scale is None else at(scale),
            0 if amax is None else at(amax),
        )  # fmt: skip
        if addresses not in self._checked.known:
            require_beside_a_norm(self._columns, self._device, lie_of(weight), lie_of(bias))
            require_beside_a_cast(self._device, lie_of(scale), lie_of(amax), None)
            self._checked.keep(addresses)
        return addresses

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: str, scale: Tensor | None, amax: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        raise NotImplementedError


class _RowsInRegisters(_NormPlan):
    """Statistics and the cast from one read of x: one scale, which is given, and no transposed operand.

    Where the scale may be 0 a second kernel follows, which returns at once unless it is.
    """

    def __init__(self, of: _Input, spread: RowLayout, task: Task) -> None:
        from cuda_kernels.device.rows import THREADS
        from cuda_kernels.host import launch
        from cuda_kernels.norm import cast

        super().__init__(of)
        config, fp8 = task.config, task.config.float8.name.lower()
        self._operands = Operands(of.device, config, of.rows, of.place.columns)
        kernel = cast.normalize_kernel(of.norm, fp8, spread, task.observes)
        groups = -(-of.rows * spread.threads_per_row // THREADS)
        blocks = min(groups, kernel.min_blocks_per_sm * launch.multiprocessors(of.device))
        shape, stride = (of.rows, of.place.columns, float(self._offset)), self._operands.strides[0]
        self._normalize = launch.Launch(kernel, blocks, (*shape, of.kind.eps, stride), of.device).start
        self._again: Callable[..., None] | None = None
        self._partials = (blocks,), (1,), torch.float32
        if not (task.given and config.nonzero):
            scaling = (0, 0.0) if task.given else (int(config.power_2), config.epsilon)
            kernel = cast.cast_normalized_kernel(of.norm, fp8, spread)
            self._again = launch.Launch(kernel, blocks, (*shape, blocks, *scaling, stride), of.device).start

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: str, scale: Tensor | None, amax: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at, again = self._at, self._again
        of_weight, of_bias, of_scale, of_amax = self._addresses(weight, bias, scale, amax)
        outputs = data, scale_inv, _, _ = self._operands.allocate()
        statistics = self._allocate(*self._statistics)
        own: Argument = 0
        if again is not None:
            amaxes = self._allocate(*self._partials)
            own = at(amaxes)
        head = at(x), self._stride, of_weight, of_bias, at(statistics), of_scale, own
        results = at(data), at(scale_inv)
        self._normalize(*head, of_amax, *results)
        if again is not None:
            again(*head, *results)
        return *outputs, statistics


class _Bands(_NormPlan):
    """The statistics of a band of rows, and then its codes, row by row and transposed, in one launch.

    One scale, which is given and not 0.
    """

    def __init__(self, of: _Input, task: Task) -> None:
        from cuda_kernels.host import launch
        from cuda_kernels.norm import bands

        super().__init__(of)
        config, fp8 = task.config, task.config.float8.name.lower()
        self._operands = Operands(of.device, config, of.rows, of.place.columns)
        kernel = bands.normalize_bands_kernel(of.norm, of.comes_in(4), fp8, config.rowwise, task.observes)
        stride, _, stride_t, _ = self._operands.strides
        numbers = of.rows, of.place.columns, of.kind.eps, stride, stride_t
        self._start = launch.Launch(kernel, -(-of.rows // bands.BAND), numbers, of.device).start

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: str, scale: Tensor | None, amax: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at = self._at
        of_weight, of_bias, of_scale, of_amax = self._addresses(weight, bias, scale, amax)
        outputs = data, scale_inv, data_t, _ = self._operands.allocate()
        statistics = self._allocate(*self._statistics)
        self._start(
            at(x), self._stride, of_weight, of_bias, at(statistics), self._offset,
            of_scale, of_amax, at(data), at(scale_inv), at(data_t),
        )  # fmt: skip
        return *outputs, statistics


class _StatisticsFirst(_NormPlan):
    """Statistics, and then any cast, which reads x again."""

    def __init__(self, of: _Input, spread: RowLayout | None, task: Task) -> None:
        from cuda_kernels.device.rows import THREADS
        from cuda_kernels.host import launch
        from cuda_kernels.norm import statistics

        super().__init__(of)
        columns = of.place.columns
        if spread:
            kernel = statistics.statistics_of_rows_kernel(of.norm.dtype, of.norm.mean, spread)
            blocks = -(-of.rows * spread.threads_per_row // THREADS)
        else:
            kernel = statistics.statistics_of_long_rows_kernel(of.norm.dtype, of.norm.mean, of.place.comes_in(4))
            blocks = of.rows
        self._start = launch.Launch(kernel, blocks, (of.rows, columns, of.kind.eps), of.device).start
        self._cast = plan_of(
            of.device, statistics.normalized_source(of.norm, of.comes_in(4)), of.rows, columns, task
        ).cast

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, config: str, scale: Tensor | None, amax: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at, stride = self._at, self._stride
        of_weight, of_bias, _, _ = self._addresses(weight, bias, None, None)
        statistics = self._allocate(*self._statistics)
        of_x, of_statistics = at(x), at(statistics)
        self._start(of_x, stride, of_statistics)
        words = of_x, stride, of_weight, of_bias, of_statistics, self._offset
        return *self._cast(words, scale, amax, counts), statistics


@planned(reference.norm_quantize, config_arg=3)
def _norm_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    weight_dtype: torch.dtype,
    bias: bool,
    config: str,
    given: bool,
    observes: bool,
    counts: Lie | None,
) -> Callable[..., Results]:
    """``address``: the lowest four bits that any of the tensors' addresses has."""
    from cuda_kernels.norm.statistics import Norm

    require_beside_a_norm(shape[1:], device, (weight_dtype, shape[1:], device))
    place, task = place_of(dtype, shape, strides, address), task_of(device, config, given, observes, counts)
    if place is None:
        return lambda x, *args: norm_quantize(x.contiguous(), *args)
    kind, cast = parse_norm_config(config), task.config
    of = _Input(device, Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, bias), kind, place, shape[0])
    spread, one_scale = of.spread, cast.layout is Layout.TENSOR and not task.counts
    plan: _NormPlan
    if spread and one_scale and cast.rowwise and not cast.columnwise:
        plan = _RowsInRegisters(of, spread, task)
    elif one_scale and given and cast.nonzero and cast.columnwise:
        plan = _Bands(of, task)
    else:
        plan = _StatisticsFirst(of, spread, task)
    return plan.op
