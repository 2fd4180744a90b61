"""Activations on CUDA tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.activation import activation_backward_loader, activation_loader
from cuda_kernels.casts.column_sums import summed_loader
from cuda_kernels.host import launch
from lightning_fp8.ops.activation import reference
from lightning_fp8.ops.activation.schema import (
    ActivationOptions,
    Results,
    activated_shape,
    parse_activation_options,
)
from lightning_fp8.ops.core.allocation import allocator, empty_tensor
from lightning_fp8.ops.core.checks import require
from lightning_fp8.ops.core.column_sums import ColumnSums, num_tile_sums
from lightning_fp8.ops.core.dispatch import check_not_empty, current_device, planned
from lightning_fp8.ops.core.options import DTYPE_NAMES, HIGH_PRECISION
from lightning_fp8.ops.core.tensor_keys import PlainKey, TensorKey, tensor_key
from lightning_fp8.ops.quantize.cuda import Loaders, planned_cast
from lightning_fp8.ops.quantize.launches import (
    CastVariant,
    cast_launches,
    cast_variant,
    overflow_counts_key,
)
from lightning_fp8.ops.quantize.outputs import with_kernel_strides
from lightning_fp8.ops.quantize.schema import CastIO, implement_cast


def activation_loaders(options_text: str, x_key: TensorKey) -> Loaders:
    """The loaders of the activations of a tensor."""
    name = parse_activation_options(options_text).name
    _, columns = activated_shape(name, x_key.shape)
    return (
        activation_loader(name, DTYPE_NAMES[x_key.dtype], x_key.is_vectorizable(4) and columns % 4 == 0),
        None,
        columns,
    )


activation_quantize = planned_cast(reference.activate, activation_loaders)


def activation_backward_quantize(
    dy: Tensor,
    x: Tensor,
    options_text: str,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    overflow_counts: Tensor | None = None,
) -> Results:
    """See :mod:`lightning_fp8.ops.activation.schema`."""
    return _backward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), options_text, scale is not None,
        amax is not None, None if overflow_counts is None else overflow_counts_key(overflow_counts),
    )(dy, x, options_text, (scale, amax, overflow_counts))  # fmt: skip


class ActivationBackwardLaunches:
    """The launches that cast the gradient and, where a dtype for it is given, add it up over rows."""

    def __init__(self, x_key: TensorKey, dy_key: TensorKey, options: ActivationOptions, variant: CastVariant) -> None:
        device = x_key.device
        aligned = x_key.is_vectorizable(4) and dy_key.is_vectorizable(4)
        loader = activation_backward_loader(options.name, DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[dy_key.dtype], aligned)
        store_loader = None
        self._sums = None
        if options.bias_dtype:
            store_loader = summed_loader(loader)
            self._sums = ColumnSums(device, num_tile_sums(x_key.rows), x_key.columns, options.bias_dtype, num_sets=1)
        self._cast = cast_launches(variant.options.layout)(
            device, loader, x_key.rows, x_key.columns, variant, store_loader
        ).cast
        self._pointer = launch.address_on(device)
        self._strides = x_key.stride, dy_key.stride
        self._allocate = allocator(device)
        self._dbias = (x_key.columns,), (1,), options.bias_dtype or torch.float32
        self._no_bias = empty_tensor(device, torch.float32)

    def run(self, dy: Tensor, x: Tensor, options_text: str, io: CastIO) -> Results:
        pointer = self._pointer
        sums = self._sums
        x_stride, dy_stride = self._strides
        loader_args = pointer(x), x_stride, pointer(dy), dy_stride
        if sums is None:
            return *self._cast(loader_args, io), self._no_bias
        dbias = self._allocate(*self._dbias)
        partials = sums.partials()
        partials_ptr = pointer(partials)
        outputs = self._cast(loader_args, io, (*loader_args, partials_ptr))
        sums.reduce(partials_ptr, pointer(dbias), 0, sums.stride)
        return *outputs, dbias


@planned(fallback=with_kernel_strides(reference.activate_backward))
def _backward_plan(
    device: torch.device, x_plain_key: PlainKey, dy_plain_key: PlainKey, options_text: str, *given: Any
) -> Callable[..., Results]:
    x_key, dy_key = TensorKey(*x_plain_key, device), TensorKey(*dy_plain_key, device)
    variant = cast_variant(device, options_text, *given)
    options = parse_activation_options(options_text)
    require("dy", dy_key, HIGH_PRECISION, activated_shape(options.name, x_key.shape), device)
    check_not_empty(x_key.shape)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, options_text, io: activation_backward_quantize(
            dy.contiguous(), x.contiguous(), options_text, *io
        )
    return ActivationBackwardLaunches(x_key, dy_key, options, variant).run


implement_cast("activation_quantize", "cuda", activation_quantize)
implement_cast("activation_backward_quantize", "cuda", activation_backward_quantize)
