"""Activations on CUDA tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fp8.ops.config import NAMES
from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.parts import ColumnSums, Place, Results, place_of
from lightning_fp8.ops.fused.schema import ActivationConfig, activated_shape, is_gated, parse_activation_config
from lightning_fp8.ops.given import Lie, compact, require_gradient
from lightning_fp8.ops.operands import allocator, nothing
from lightning_fp8.ops.planning import current_device, planned
from lightning_fp8.ops.plans import Task, Values, casting, plan_of, task_of


def _activated(
    config: str, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], address: int
) -> Values | None:
    from cuda_kernels.casts.activation import activation_source

    x, name = place_of(dtype, shape, strides, address), parse_activation_config(config).name
    if x is None:
        return None
    columns = shape[1] // 2 if is_gated(name) else shape[1]
    source = activation_source(name, NAMES[dtype], x.comes_in(4) and columns % 4 == 0)
    return Values(source, x.stride, shape[0], columns)


activation_quantize = casting(reference.activation_quantize, _activated)


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    config: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Results:
    op = _activation_backward_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), x.data_ptr() % 16,
        dy.dtype, dy.shape, dy.stride(), dy.data_ptr() % 16,
        config, scale is not None, amax is not None, None if counts is None else compact("counts", counts),
    )  # fmt: skip
    return op(dy, x, config, scale, amax, counts)


class _ActivationBackward:
    """The gradient, cast; and, where a dtype for it is given, its sum over rows."""

    def __init__(
        self, device: torch.device, kind: ActivationConfig, shape: Sequence[int], x: Place, dy: Place, task: Task
    ) -> None:
        from cuda_kernels.casts.activation import activation_backward_source
        from cuda_kernels.casts.column_sums import summed_source

        rows, columns = shape
        aligned = x.comes_in(4) and dy.comes_in(4)
        source = activation_backward_source(kind.name, NAMES[x.dtype], NAMES[dy.dtype], aligned)
        self._sums = ColumnSums(device, -(-rows // 16), columns, kind.bias, 1) if kind.bias else None
        plan = plan_of(device, source, rows, columns, task, summed_source(source) if kind.bias else None)
        self._at, self._cast, self._strides = plan.at, plan.cast, (x.stride, dy.stride)
        self._allocate, self._dbias = allocator(device), ((columns,), (1,), kind.bias or torch.float32)
        self._no_bias = nothing(device, torch.float32)

    def op(
        self, dy: Tensor, x: Tensor, config: str, scale: Tensor | None, amax: Tensor | None, counts: Tensor | None
    ) -> Results:
        at, sums, (x_stride, dy_stride) = self._at, self._sums, self._strides
        words = at(x), x_stride, at(dy), dy_stride
        if sums is None:
            return *self._cast(words, scale, amax, counts), self._no_bias
        dbias, partials = self._allocate(*self._dbias), sums.partials()
        outputs = self._cast(words, scale, amax, counts, (*words, at(partials)))
        sums.add(partials, dbias)
        return *outputs, dbias


@planned(reference.activation_backward_quantize, config_arg=2)
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
    config: str,
    given: bool,
    observes: bool,
    counts: Lie | None,
) -> Callable[..., Results]:
    task, kind = task_of(device, config, given, observes, counts), parse_activation_config(config)
    require_gradient((dy_dtype, dy_shape, device), activated_shape(kind.name, shape), device)
    x, dy = place_of(dtype, shape, strides, address), place_of(dy_dtype, dy_shape, dy_strides, dy_address)
    if x is None or dy is None:
        return lambda dy, x, *args: activation_backward_quantize(dy.contiguous(), x.contiguous(), *args)
    return _ActivationBackward(device, kind, shape, x, dy, task).op
