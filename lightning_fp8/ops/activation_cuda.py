"""Activations on CUDA tensors, and their gradients. They are planned once for each key of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.activation import activation_backward_loader, activation_loader
from cuda_kernels.casts.column_sums import summed_loader
from cuda_kernels.casts.gated import gated_backward_loader, gated_loader
from cuda_kernels.device.tile import TileLoader
from cuda_kernels.host import launch
from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.activation import (
    GatedGradients,
    GradientOutputs,
    activated_shape,
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_gradients,
    gated_quantize_op,
    reference_activation,
    reference_activation_backward,
    reference_gated,
    reference_gated_backward,
)
from lightning_fp8.ops.cast import Outputs
from lightning_fp8.ops.cast_cuda import (
    CastVariant,
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
from lightning_fp8.ops.plans import Run, check_not_empty, current_device, planned


def activation_loaders(x_key: TensorKey, activation: str) -> Loaders:
    """The loaders of the activations of a tensor."""
    _, columns = activated_shape(activation, x_key.shape)
    aligned = x_key.is_vectorizable(4) and columns % 4 == 0
    return activation_loader(activation, DTYPE_NAMES[x_key.dtype], aligned), None, columns


activation_on_cuda, _ = planned_cast("activation", reference_activation, activation_loaders)


def activation_backward_on_cuda(
    dy: Tensor, x: Tensor, activation: str, bias_dtype: torch.dtype | None, cast: Cast,
    scale: Tensor | None, amax: Tensor | None, overflow_counts: Tensor | None,
) -> GradientOutputs:  # fmt: skip
    """Cast the gradient, and sum it over rows if ``bias_dtype`` is not None."""
    run = _backward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), activation, bias_dtype,
        variant_key(cast, scale, amax, overflow_counts),
    )  # fmt: skip
    return run(dy, x, activation, bias_dtype, cast, scale, amax, overflow_counts)  # type: ignore[no-any-return]


class ActivationBackwardLaunches:
    """The launches that cast the gradient and optionally sum it over rows."""

    def __init__(
        self,
        x_key: TensorKey,
        dy_key: TensorKey,
        activation: str,
        bias_dtype: torch.dtype | None,
        variant: CastVariant,
    ) -> None:
        device = x_key.device
        aligned = x_key.is_vectorizable(4) and dy_key.is_vectorizable(4)
        loader = activation_backward_loader(activation, DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[dy_key.dtype], aligned)
        store_loader = None
        self._sums = None
        if bias_dtype:
            store_loader = summed_loader(loader)
            self._sums = ColumnSums(device, num_tile_sums(x_key.rows), x_key.columns, bias_dtype, num_sets=1)
        self._cast = cast_launches(variant.cast.layout)(
            device, loader, x_key.rows, x_key.columns, variant, store_loader
        ).cast
        self._pointer = launch.address_on(device)
        self._strides = x_key.stride, dy_key.stride
        self._allocate = allocator(device)
        self._dbias = (x_key.columns,), (1,), bias_dtype or torch.float32
        self._no_bias = empty_tensor(device, torch.float32)

    def run(self, dy: Tensor, x: Tensor, *args: Any) -> GradientOutputs:
        """Launch the kernels. ``args`` are the options, followed by the arguments of the cast."""
        scale, amax, overflow_counts = args[-3:]
        pointer = self._pointer
        sums = self._sums
        x_stride, dy_stride = self._strides
        loader_args = pointer(x), x_stride, pointer(dy), dy_stride
        if sums is None:
            return GradientOutputs(*self._cast(loader_args, scale, amax, overflow_counts), self._no_bias)
        dbias = self._allocate(*self._dbias)
        partials = sums.partials()
        partials_ptr = pointer(partials)
        outputs = self._cast(loader_args, scale, amax, overflow_counts, (*loader_args, partials_ptr))
        sums.reduce(partials_ptr, pointer(dbias), 0, sums.stride)
        return GradientOutputs(*outputs, dbias)


@planned(fallback=with_kernel_strides(reference_activation_backward, -4), name="activation_backward")
def _backward_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    dy_plain_key: PlainKey,
    activation: str,
    bias_dtype: torch.dtype | None,
    variant_key: Any,
) -> Callable[..., Any]:
    x_key, dy_key = TensorKey(*x_plain_key, device), TensorKey(*dy_plain_key, device)
    check_not_empty(x_key.shape)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, *args: activation_backward_on_cuda(dy.contiguous(), x.contiguous(), *args)
    return ActivationBackwardLaunches(x_key, dy_key, activation, bias_dtype, variant_of(variant_key)).run


def _planned_gated(
    name: str, reference: Run, loader_of: Callable[[str, str, bool], TileLoader], num_tensors: int
) -> Run:
    """The op ``(*tensors, activation, cast, *observed)`` that casts the values of a tile loader.

    ``observed`` is ``scale, amax, overflow_counts``, or of a loader of two tensors ``scale, scale, amax, amax``.

    Args:
        name: the name of its plans.
        reference: computes the same without kernels.
        loader_of: returns the loader of the values, given an activation's name, a dtype and whether rows are aligned to
            vectors.
        num_tensors: the number of tensors, which all have the same shape and dtype.
    """

    @planned(fallback=with_kernel_strides(reference, num_tensors + 1), name=name)
    def plan(device: torch.device, plain_keys: tuple[PlainKey, ...], activation: str, variant_key: Any) -> Run:
        keys = [TensorKey(*key, device) for key in plain_keys]
        rows, columns = keys[0].shape
        check_not_empty((rows, columns))
        if not all(key.has_contiguous_rows for key in keys):
            return lambda *args: run(*(x.contiguous() for x in args[:num_tensors]), *args[num_tensors:])
        variant = variant_of(variant_key)
        loader = loader_of(activation, DTYPE_NAMES[keys[0].dtype], all(key.is_vectorizable(4) for key in keys))
        launches = cast_launches(variant.cast.layout)(device, loader, rows, columns, variant)
        cast, cast_two, pointer = launches.cast, launches.cast_two, launch.address_on(device)
        strides = [key.stride for key in keys]

        def launch_cast(*args: Any) -> Outputs | GatedGradients:
            loader_args = [n for x, stride in zip(args, strides) for n in (pointer(x), stride)]
            if loader.tensors == 1:
                return cast(loader_args, *args[-3:])
            first, second = cast_two(loader_args, args[-4:-2], args[-2:])
            return gated_gradients(first, second)

        return launch_cast

    def run(*args: Any) -> Any:
        tensors = args[:num_tensors]
        activation, cast, *observed = args[num_tensors:]
        if len(observed) == 4:  # of two tensors; both have scales, or none
            scale, _, amax, factor_amax = observed
            observed = [scale, factor_amax if amax is None else amax, None]
        x = tensors[0]
        key = variant_key(cast, *observed)
        planned_run = plan(x.device, x.is_cuda and current_device(), tuple(map(tensor_key, tensors)), activation, key)
        return planned_run(*args)

    return run


activation_quantize_op.implement("cuda", activation_on_cuda)
activation_backward_quantize_op.implement("cuda", activation_backward_on_cuda)
gated_quantize_op.implement("cuda", _planned_gated("gated", reference_gated, gated_loader, 2))
gated_backward_quantize_op.implement(
    "cuda", _planned_gated("gated_backward", reference_gated_backward, gated_backward_loader, 3)
)
