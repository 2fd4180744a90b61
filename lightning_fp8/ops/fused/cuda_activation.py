"""Activations on CUDA tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_fp8.ops.fused.parts import ColumnSums, Place, Results, place_of
from lightning_fp8.ops.fused.schema import is_gated
from lightning_fp8.ops.how import parsed
from lightning_fp8.ops.operands import NAMES, allocator, nothing
from lightning_fp8.ops.plans import KEPT_PLANS, CastPlan, Task, plan_of


def activation_quantize(
    x: Tensor,
    activation: str,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    address, given, observes, counted = x.data_ptr() % 16, scale is not None, seen is not None, counts is not None
    planned = _activation_plan(
        x.device, x.dtype, x.shape, x.stride(), address, activation, how, given, observes, counted
    )
    if planned is None:
        return activation_quantize(x.contiguous(), activation, how, scale, seen, counts)
    plan, pitch = planned
    return plan((plan.at(x), pitch), scale, seen, counts)


@lru_cache(KEPT_PLANS)
def _activation_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    activation: str,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> tuple[CastPlan, int] | None:
    """The plan, and the pitch of x; None if x has to be made contiguous first."""
    from cuda_kernels.activation import activation_source

    x = place_of(dtype, shape, strides, address)
    if x is None:
        return None
    rows, columns = shape[0], shape[1] // 2 if is_gated(activation) else shape[1]
    source = activation_source(activation, NAMES[dtype], x.comes_in(4) and columns % 4 == 0)
    return plan_of(device, source, rows, columns, Task(parsed(how), given, observes, counts)), x.pitch


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    bias_dtype: torch.dtype | None,
    how: str,
    scale: Tensor | None = None,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    plan = _activation_backward_plan(
        x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16,
        dy.dtype, dy.shape, dy.stride(), dy.data_ptr() % 16,
        activation, bias_dtype, how, scale is not None, seen is not None, counts is not None,
    )  # fmt: skip
    if plan is None:
        dy, x = dy.contiguous(), x.contiguous()
        return activation_backward_quantize(dy, x, activation, bias_dtype, how, scale, seen, counts)
    return plan(dy, x, scale, seen, counts)


class _ActivationBackward:
    """The gradient, cast; and, where a dtype for it is given, its sum over rows."""

    def __init__(
        self, device: torch.device, activation: str, shape: Sequence[int], x: Place, dy: Place, task: Task,
        bias_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        from cuda_kernels.activation import activation_backward_source
        from cuda_kernels.column_sums import summed_source

        rows, columns = shape
        aligned = x.comes_in(4) and dy.comes_in(4)
        source = activation_backward_source(activation, NAMES[x.dtype], NAMES[dy.dtype], aligned)
        self._sums = ColumnSums(device, -(-rows // 16), columns, bias_dtype, 1) if bias_dtype else None
        self._cast = plan_of(device, source, rows, columns, task, summed_source(source) if bias_dtype else None)
        self._allocate, self._columns, self._bias_dtype = allocator(device), columns, bias_dtype
        self._pitches = x.pitch, dy.pitch

    def __call__(
        self, dy: Tensor, x: Tensor, scale: Tensor | None, seen: Tensor | None, counts: Tensor | None
    ) -> Results:
        cast, sums, (x_pitch, dy_pitch) = self._cast, self._sums, self._pitches
        words = cast.at(x), x_pitch, cast.at(dy), dy_pitch
        if sums is None or self._bias_dtype is None:
            return *cast(words, scale, seen, counts), nothing(x.device, torch.float32)
        dbias, partials = self._allocate((self._columns,), (1,), self._bias_dtype), sums.partials()
        outputs = cast(words, scale, seen, counts, (*words, cast.at(partials)))
        sums(partials, dbias)
        return *outputs, dbias


@lru_cache(KEPT_PLANS)
def _activation_backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    address: int,
    dy_dtype: torch.dtype,
    dy_shape: Sequence[int],
    dy_strides: Sequence[int],
    dy_address: int,
    activation: str,
    bias_dtype: torch.dtype | None,
    how: str,
    given: bool,
    observes: bool,
    counts: bool,
) -> _ActivationBackward | None:
    """The plan; None if x or dy have to be made contiguous first."""
    x, dy = place_of(dtype, shape, strides, address), place_of(dy_dtype, dy_shape, dy_strides, dy_address)
    if x is None or dy is None:
        return None
    task = Task(parsed(how), given, observes, counts)
    return _ActivationBackward(device, activation, shape, x, dy, task, bias_dtype)
