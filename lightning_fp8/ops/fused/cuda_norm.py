"""Normalizations on CUDA tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.parts import ColumnSums, Place, Results, place_of
from lightning_fp8.ops.fused.schema import NormKind, parsed_norm
from lightning_fp8.ops.how import DTYPES, NAMES, parsed
from lightning_fp8.ops.operands import Operands, allocator, nothing
from lightning_fp8.ops.planning import current_device, planned
from lightning_fp8.ops.plans import Task, plan_of
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.device.rows import RowLayout
    from cuda_kernels.host.launch import Argument
    from cuda_kernels.norm.statistics import Norm


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    op = _norm_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), addresses % 16, weight.dtype,
        bias is not None, how, scale is not None, seen is not None, counts is not None,
    )  # fmt: skip
    return op(x, weight, bias, how, scale, seen, counts)


class _Input(NamedTuple):
    """What to normalize: ``rows`` that lie at ``place``, whose address says the weight's and bias's alignment too."""

    device: torch.device
    norm: Norm
    kind: NormKind
    place: Place
    rows: int

    def comes_in(self, elements: int, size: int | None = None) -> bool:
        """Whether the rows, weight and bias are whole vectors; as :meth:`Place.comes_in`."""
        weight = self.place._replace(dtype=DTYPES[self.norm.weight_dtype], pitch=0)
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
        self._pitch, self._offset = of.place.pitch, int(of.kind.zero_centered)
        self._statistics = (of.kind.statistics, of.rows), (of.rows, 1), torch.float32

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, how: str, scale: Tensor | None, seen: Tensor | None,
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
        how, fp8 = task.how, task.how.float8.name.lower()
        self._operands = Operands(of.device, how, of.rows, of.place.columns)
        kernel = cast.normalize_kernel(of.norm, fp8, spread, task.observes)
        groups = -(-of.rows * spread.threads_per_row // THREADS)
        blocks = min(groups, kernel.min_blocks_per_sm * launch.multiprocessors(of.device))
        shape, pitch = (of.rows, of.place.columns, float(self._offset)), self._operands.pitches[0]
        self._normalize = launch.Launch(kernel, blocks, (*shape, of.kind.eps, pitch), of.device).start
        self._again: Callable[..., None] | None = None
        self._partials = (blocks,), (1,), torch.float32
        if not (task.given and how.nonzero):
            scaling = (0, 0.0) if task.given else (int(how.power_2), how.epsilon)
            kernel = cast.cast_normalized_kernel(of.norm, fp8, spread)
            self._again = launch.Launch(kernel, blocks, (*shape, blocks, *scaling, pitch), of.device).start

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, how: str, scale: Tensor | None, seen: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at, again = self._at, self._again
        outputs = data, scale_inv, _, _ = self._operands.allocate()
        statistics = self._allocate(*self._statistics)
        own: Argument = 0
        if again is not None:
            amaxes = self._allocate(*self._partials)
            own = at(amaxes)
        head = (
            at(x), self._pitch, at(weight), 0 if bias is None else at(bias), at(statistics),
            0 if scale is None else at(scale), own,
        )  # fmt: skip
        results = at(data), at(scale_inv)
        self._normalize(*head, 0 if seen is None else at(seen), *results)
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
        how, fp8 = task.how, task.how.float8.name.lower()
        self._operands = Operands(of.device, how, of.rows, of.place.columns)
        kernel = bands.normalize_bands_kernel(of.norm, of.comes_in(4), fp8, how.rowwise, task.observes)
        pitch, _, pitch_t, _ = self._operands.pitches
        numbers = of.rows, of.place.columns, of.kind.eps, pitch, pitch_t
        self._start = launch.Launch(kernel, -(-of.rows // bands.BAND), numbers, of.device).start

    def op(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, how: str, scale: Tensor | None, seen: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at = self._at
        outputs = data, scale_inv, data_t, _ = self._operands.allocate()
        statistics = self._allocate(*self._statistics)
        self._start(
            at(x), self._pitch, at(weight), 0 if bias is None else at(bias), at(statistics), self._offset,
            0 if scale is None else at(scale), 0 if seen is None else at(seen), at(data), at(scale_inv), at(data_t),
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
        self, x: Tensor, weight: Tensor, bias: Tensor | None, how: str, scale: Tensor | None, seen: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at, pitch = self._at, self._pitch
        statistics = self._allocate(*self._statistics)
        of_x, of_statistics = at(x), at(statistics)
        self._start(of_x, pitch, of_statistics)
        words = of_x, pitch, at(weight), 0 if bias is None else at(bias), of_statistics, self._offset
        return *self._cast(words, scale, seen, counts), statistics


@planned(reference.norm_quantize, how_at=3)
def _norm_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    weight_dtype: torch.dtype,
    bias: bool,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> Callable[..., Results]:
    """``address``: the lowest four bits that any of the tensors' addresses has."""
    from cuda_kernels.norm.statistics import Norm

    place, task = place_of(dtype, shape, strides, address), Task(parsed(how), given, observes, counts)
    if place is None:
        return lambda x, *args: norm_quantize(x.contiguous(), *args)
    kind, cast = parsed_norm(how), task.how
    of = _Input(device, Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, bias), kind, place, shape[0])
    spread, one_scale = of.spread, cast.layout is Layout.TENSOR and not counts
    plan: _NormPlan
    if spread and one_scale and cast.rowwise and not cast.columnwise:
        plan = _RowsInRegisters(of, spread, task)
    elif one_scale and given and cast.nonzero and cast.columnwise:
        plan = _Bands(of, task)
    else:
        plan = _StatisticsFirst(of, spread, task)
    return plan.op


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.contiguous()
    op = _norm_backward_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), dy.dtype, dy.stride(), weight.dtype,
        (x.data_ptr() | dy.data_ptr() | weight.data_ptr()) % 16, norm,
    )  # fmt: skip
    return op(dy, x, weight, statistics, norm)


class _NormBackward:
    """dx, and partial sums over rows, which a second kernel adds up."""

    def __init__(
        self, device: torch.device, norm: Norm, rows: int, weight: Place, x: Place, dy: Place, offset: float
    ) -> None:
        from cuda_kernels.host import launch
        from cuda_kernels.norm import backward as kernels

        inputs, columns, dy_dtype = (x, dy, weight), x.columns, NAMES[dy.dtype]
        spread = None
        if all(each.comes_in(8, 16) for each in inputs):
            spread = kernels.backward_row_layout((norm.dtype, dy_dtype), columns)
        if spread:
            kernel = kernels.norm_backward_kernel(norm, dy_dtype, spread)
        else:
            aligned = all(each.comes_in(4) for each in inputs)
            kernel = kernels.long_norm_backward_kernel(norm, dy_dtype, aligned)
        blocks = min(rows, kernel.min_blocks_per_sm * launch.multiprocessors(device))
        self._at, self._allocate = launch.address_on(device), allocator(device)
        self._dx = (rows, columns), (columns, 1), x.dtype
        self._dweight = (columns,), (1,), weight.dtype
        self._pitches = x.pitch, dy.pitch
        self._no_bias = None if norm.bias else nothing(device, weight.dtype)
        self._start = launch.Launch(kernel, blocks, (rows, columns, offset), device).start
        self._sums = ColumnSums(device, blocks, columns, weight.dtype, 1 + norm.bias)

    def op(self, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        at, new, sums, (x_pitch, dy_pitch) = self._at, self._allocate, self._sums, self._pitches
        dx, dweight, dbias = new(*self._dx), new(*self._dweight), self._no_bias
        if dbias is None:
            dbias = new(*self._dweight)
        partials = sums.partials()
        self._start(
            at(x), x_pitch, at(dy), dy_pitch, at(weight), at(statistics), at(dx), at(partials), sums.pitch,
        )  # fmt: skip
        sums.add(partials, dweight, dbias)
        return dx, dweight, dbias


@planned(reference.norm_backward)
def _norm_backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    dy_dtype: torch.dtype,
    dy_strides: Sequence[int],
    weight_dtype: torch.dtype,
    address: int,
    norm: str,
) -> Callable[..., Results]:
    from cuda_kernels.norm.statistics import Norm

    x, dy = place_of(dtype, shape, strides, address), place_of(dy_dtype, shape, dy_strides, address)
    if x is None or dy is None:
        return lambda dy, x, *args: norm_backward(dy.contiguous(), x.contiguous(), *args)
    kind, weight = parsed_norm(norm), Place(weight_dtype, shape[1], 0, address)
    of = Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, kind.bias)
    return _NormBackward(device, of, shape[0], weight, x, dy, float(kind.zero_centered)).op
