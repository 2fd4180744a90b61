"""Activations on CUDA tensors, and their gradients. They are planned once for each key of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.activation import (
    activation_backward_loader,
    activation_loader,
    gated_backward_loader,
    gated_loader,
)
from cuda_kernels.casts.column_sums import summed_loader
from cuda_kernels.device.tile import TileLoader
from cuda_kernels.host import launch
from lightning_fp8.ops.activation import (
    GradientOutputs,
    activated_shape,
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_quantize_op,
    reference_activation,
    reference_activation_backward,
    reference_gated,
    reference_gated_backward,
)
from lightning_fp8.ops.cast_cuda import (
    Loaders,
    cast_launches,
    planned_cast,
    variant_key,
    variant_of,
    with_kernel_strides,
)
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.column_sums import ColumnSums, num_tile_sums
from lightning_fp8.ops.memory import PlainKey, TensorKey, allocator, empty_tensor, tensor_key
from lightning_fp8.ops.plans import check_not_empty, current_device, planned


def activation_loaders(x_key: TensorKey, activation: str) -> Loaders:
    """The loaders of the activations of a tensor."""
    _, columns = activated_shape(activation, x_key.shape)
    aligned = x_key.is_vectorizable(4) and columns % 4 == 0
    return activation_loader(activation, DTYPE_NAMES[x_key.dtype], aligned), None, columns


activation_on_cuda, _ = planned_cast("activation", reference_activation, activation_loaders)


def activation_backward_on_cuda(dy: Tensor, x: Tensor, *args: Any) -> GradientOutputs:
    """Cast the gradient, and sum it over rows if ``bias_dtype`` is not None."""
    activation, bias_dtype, cast, *observed = args
    run = _backward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), activation, bias_dtype,
        variant_key(cast, *observed),
    )  # fmt: skip
    return run(dy, x, *args)  # type: ignore[no-any-return]


@planned(fallback=with_kernel_strides(reference_activation_backward), name="activation_backward")
def _backward_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    dy_plain_key: PlainKey,
    activation: str,
    bias_dtype: torch.dtype | None,
    variant_key: Any,
) -> Callable[..., GradientOutputs]:
    x_key, dy_key = TensorKey(*x_plain_key, device), TensorKey(*dy_plain_key, device)
    rows, columns = x_key.shape
    check_not_empty(x_key.shape)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, *args: activation_backward_on_cuda(dy.contiguous(), x.contiguous(), *args)
    aligned = x_key.is_vectorizable(4) and dy_key.is_vectorizable(4)
    loader = activation_backward_loader(activation, DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[dy_key.dtype], aligned)
    store_loader = summed_loader(loader) if bias_dtype else None
    variant, x_stride, dy_stride = variant_of(variant_key), x_key.stride, dy_key.stride
    cast = cast_launches(variant.cast.layout)(device, loader, rows, columns, variant, store_loader).cast
    pointer = launch.address_on(device)
    no_bias = empty_tensor(device, torch.float32)

    def run(dy: Tensor, x: Tensor, *args: Any) -> GradientOutputs:
        return GradientOutputs(*cast((pointer(x), x_stride, pointer(dy), dy_stride), *args[-2:]), no_bias)

    if bias_dtype is None:
        return run
    sums, allocate = ColumnSums(device, num_tile_sums(rows), columns, bias_dtype, num_sets=1), allocator(device)
    of_dbias = (columns,), (1,), bias_dtype

    def run_with_bias(dy: Tensor, x: Tensor, *args: Any) -> GradientOutputs:
        loader_args = pointer(x), x_stride, pointer(dy), dy_stride
        dbias, partials = allocate(*of_dbias), sums.partials()
        partials_ptr = pointer(partials)
        scale, amax = args[-2:]
        outputs = cast(loader_args, scale, amax, (*loader_args, partials_ptr))
        sums.reduce(partials_ptr, pointer(dbias), 0, sums.stride)
        return GradientOutputs(*outputs, dbias)

    return run_with_bias


def _gated_loaders(loader_of: Callable[[str, str, bool], TileLoader], *keys_and_activation: Any) -> Loaders:
    *keys, activation = keys_and_activation
    aligned = all(key.is_vectorizable(4) for key in keys)
    return loader_of(activation, DTYPE_NAMES[keys[0].dtype], aligned), None, keys[0].columns


gated_on_cuda, _ = planned_cast("gated", reference_gated, partial(_gated_loaders, gated_loader), num_tensors=2)
gated_backward_on_cuda, _ = planned_cast(
    "gated_backward", reference_gated_backward, partial(_gated_loaders, gated_backward_loader), 3, num_observed=4
)
activation_quantize_op.implement("cuda", activation_on_cuda)
activation_backward_quantize_op.implement("cuda", activation_backward_on_cuda)
gated_quantize_op.implement("cuda", gated_on_cuda)
gated_backward_quantize_op.implement("cuda", gated_backward_on_cuda)
