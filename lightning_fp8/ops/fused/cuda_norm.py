"""Normalizations on CUDA tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops.fused.parts import ColumnSums, Place, Results, place_of
from lightning_fp8.ops.fused.schema import NormKind, parsed_norm
from lightning_fp8.ops.how import parsed
from lightning_fp8.ops.operands import NAMES, Operands, allocator, nothing
from lightning_fp8.ops.plans import KEPT_PLANS, CastPlan, Task, plan_of
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.launch import Argument
    from cuda_kernels.norm import Norm
    from cuda_kernels.rows import Spread


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: str,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    of_bias = None if bias is None else bias.data_ptr() % 16
    plan = _norm_plan(
        x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16, weight.dtype, weight.data_ptr() % 16, of_bias,
        norm, how, scale is not None, seen is not None, counts is not None,
    )  # fmt: skip
    if plan is None or not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        bias = None if bias is None else bias.contiguous()
        x, weight = x.contiguous(), weight.contiguous()
        return norm_quantize(x, weight, bias, norm, how, scale, seen, counts)
    return plan(x, weight, bias, scale, seen, counts)


class _NormalizeFirst:
    """Statistics and the cast from one read of x: one scale, which is given, and no transposed operand.

    Where the scale may be 0 a second kernel follows, which returns at once unless it is.
    """

    def __init__(
        self, device: torch.device, norm: Norm, spread: Spread, place: Place, rows: int, kind: NormKind, task: Task
    ) -> None:  # fmt: skip
        from cuda_kernels import launch, norm_cast
        from cuda_kernels.rows import THREADS

        how, fp8 = task.how, task.how.float8.name.lower()
        self._at, self._allocate, self._operands = (
            launch.address_on(device), allocator(device), Operands(device, how, rows, place.columns)
        )  # fmt: skip
        self._pitch, self._statistics = place.pitch, _Statistics(kind, rows, device)
        kernel = norm_cast.normalize_kernel(norm, fp8, spread, task.observes)
        groups = -(-rows * spread.threads // THREADS)
        blocks = min(groups, kernel.blocks_per_multiprocessor * launch.multiprocessors(device))
        shape, pitch = (rows, place.columns, float(kind.zero_centered)), self._operands.pitches[0]
        self._normalize = launch.Launch(kernel, blocks, (*shape, kind.eps, pitch), device)
        self._again = None
        if not (task.given and how.nonzero):
            scaling = (0, 0.0) if task.given else (int(how.power_2), how.epsilon)
            kernel = norm_cast.cast_normalized_kernel(norm, fp8, spread)
            self._again = launch.Launch(kernel, blocks, (*shape, blocks, *scaling, pitch), device)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, seen: Tensor | None, counts: None
    ) -> Results:
        at, again = self._at, self._again
        outputs = data, scale_inv, _, _ = self._operands.allocate()
        statistics, mean, rstd = self._statistics.new()
        own: Argument = 0
        if again is not None:
            amaxes = self._allocate((again.blocks,), (1,), torch.float32)
            own = at(amaxes)
        head = (
            at(x), self._pitch, at(weight), 0 if bias is None else at(bias), mean, rstd,
            0 if scale is None else at(scale), own,
        )  # fmt: skip
        results = at(data), at(scale_inv)
        self._normalize(*head, 0 if seen is None else at(seen), *results)
        if again is not None:
            again(*head, *results)
        return *outputs, statistics


class _StatisticsFirst:
    """Statistics, and then any cast, which reads x again."""

    def __init__(
        self, device: torch.device, norm: Norm, spread: Spread | None, quads: bool, place: Place, rows: int,
        kind: NormKind, cast: CastPlan,
    ) -> None:  # fmt: skip
        from cuda_kernels import launch
        from cuda_kernels import norm as kernels
        from cuda_kernels.rows import THREADS

        self._cast, self._statistics = cast, _Statistics(kind, rows, device)
        self._pitch, self._offset = place.pitch, int(kind.zero_centered)
        if spread:
            kernel = kernels.statistics_of_rows_kernel(norm.dtype, norm.mean, spread)
            blocks = -(-rows * spread.threads // THREADS)
        else:
            kernel, blocks = kernels.statistics_of_long_rows_kernel(norm.dtype, norm.mean, quads), rows
        self._start = launch.Launch(kernel, blocks, (rows, place.columns, kind.eps), device)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, seen: Tensor | None,
        counts: Tensor | None,
    ) -> Results:  # fmt: skip
        at, (statistics, *of_rows) = self._cast.at, self._statistics.new()
        lies = at(x), self._pitch
        self._start(*lies, *of_rows)
        words = *lies, at(weight), 0 if bias is None else at(bias), *of_rows, self._offset
        return *self._cast(words, scale, seen, counts), statistics


class _Statistics:
    """Of rows, in one tensor: the mean, if there is one, and 1 / the deviation."""

    def __init__(self, kind: NormKind, rows: int, device: torch.device) -> None:
        from cuda_kernels import launch

        self._at, self._allocate = launch.address_on(device), allocator(device)
        self._shape, self._strides, self._rstd = (kind.statistics, rows), (rows, 1), 4 * rows * (kind.statistics - 1)

    def new(self) -> tuple[Tensor, Argument, int]:
        """The tensor, and the addresses of means and deviations; one and the same where there are no means."""
        statistics = self._allocate(self._shape, self._strides, torch.float32)
        return statistics, self._at(statistics), statistics.data_ptr() + self._rstd


@lru_cache(KEPT_PLANS)
def _norm_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    weight_dtype: torch.dtype,
    weight_address: int,
    bias_address: int | None,
    norm: str,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> Callable[..., Results] | None:
    """The plan; None if x has to be made contiguous first."""
    from cuda_kernels import norm as kernels
    from cuda_kernels.rows import cast_spread

    place, task = place_of(dtype, shape, strides, address), Task(parsed(how), given, observes, counts)
    if place is None:
        return None
    rows, columns = shape
    parameters = [Place(weight_dtype, columns, 0, at) for at in (weight_address, bias_address) if at is not None]
    kind = parsed_norm(norm)
    of = kernels.Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, bias_address is not None)

    def come_in(elements: int, size: int | None = None) -> bool:
        return all(each.comes_in(elements, size) for each in (place, *parameters))

    spread = cast_spread(of.dtype, columns) if come_in(8, 16) else None
    only_rows = task.how.layout is Layout.TENSOR and task.how.rowwise and not task.how.columnwise and not counts
    if spread and only_rows:
        return _NormalizeFirst(device, of, spread, place, rows, kind, task)
    cast = plan_of(device, kernels.normalized_source(of, come_in(4)), rows, columns, task)
    return _StatisticsFirst(device, of, spread, place.comes_in(4), place, rows, kind, cast)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _norm_backward_plan(
        x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16, dy.dtype, dy.stride(), dy.data_ptr() % 16,
        weight.dtype, weight.data_ptr() % 16, norm, bias,
    )  # fmt: skip
    if plan is None or not weight.is_contiguous():
        dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
        return norm_backward(dy, x, weight, statistics, norm, bias)
    return plan(dy, x, weight, statistics)


class _NormBackward:
    """dx, and partial sums over rows, which a second kernel adds up."""

    def __init__(
        self, device: torch.device, norm: Norm, rows: int, weight: Place, x: Place, dy: Place, offset: float
    ) -> None:
        from cuda_kernels import launch
        from cuda_kernels import norm_backward as kernels

        inputs, columns, dy_dtype = (x, dy, weight), x.columns, NAMES[dy.dtype]
        spread = None
        if all(each.comes_in(8, 16) for each in inputs):
            spread = kernels.backward_spread((norm.dtype, dy_dtype), columns)
        if spread:
            kernel = kernels.norm_backward_kernel(norm, dy_dtype, spread)
        else:
            aligned = all(each.comes_in(4) for each in inputs)
            kernel = kernels.long_norm_backward_kernel(norm, dy_dtype, aligned)
        blocks = min(rows, kernel.blocks_per_multiprocessor * launch.multiprocessors(device))
        self._at, self._allocate = launch.address_on(device), allocator(device)
        self._shape, self._dtypes, self._pitches = (rows, columns), (x.dtype, weight.dtype), (x.pitch, dy.pitch)
        self._rstd = 4 * rows if norm.mean else 0
        self._no_bias = None if norm.bias else nothing(device, weight.dtype)
        self._start = launch.Launch(kernel, blocks, (rows, columns, offset), device)
        self._sums = ColumnSums(device, blocks, columns, weight.dtype, 1 + norm.bias)

    def __call__(self, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at, new, (rows, columns), (dtype, of_weight) = self._at, self._allocate, self._shape, self._dtypes
        x_pitch, dy_pitch = self._pitches
        dx, dweight, dbias = new((rows, columns), (columns, 1), dtype), new((columns,), (1,), of_weight), self._no_bias
        if dbias is None:
            dbias = new((columns,), (1,), of_weight)
        partials = self._sums.partials()
        self._start(
            at(x),
            x_pitch,
            at(dy),
            dy_pitch,
            at(weight),
            at(statistics),
            statistics.data_ptr() + self._rstd,
            at(dx),
            at(partials),
            self._sums.pitch,
        )
        self._sums(partials, dweight, dbias)
        return dx, dweight, dbias


@lru_cache(KEPT_PLANS)
def _norm_backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    dy_dtype: torch.dtype,
    dy_strides: Sequence[int],
    dy_address: int,
    weight_dtype: torch.dtype,
    weight_address: int,
    norm: str,
    bias: bool,
) -> _NormBackward | None:
    """The plan; None if x or dy have to be made contiguous first."""
    from cuda_kernels.norm import Norm

    x, dy = place_of(dtype, shape, strides, address), place_of(dy_dtype, shape, dy_strides, dy_address)
    if x is None or dy is None:
        return None
    kind, weight = parsed_norm(norm), Place(weight_dtype, shape[1], 0, weight_address)
    of = Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, bias)
    return _NormBackward(device, of, shape[0], weight, x, dy, float(kind.zero_centered))
