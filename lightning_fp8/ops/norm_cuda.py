"""Norms on CUDA tensors, and their gradients. They are planned once for each key of tensors.

There are two ways to normalize and cast, each with a class of launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.transpose import transpose_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.device.tile import num_tiles
from cuda_kernels.host import launch
from cuda_kernels.host.launch import Argument
from cuda_kernels.kernel import KernelError
from cuda_kernels.norm.backward import backward_row_layout, long_norm_backward_kernel, norm_backward_kernel
from cuda_kernels.norm.cast import cast_normalized_kernel, normalize_kernel
from cuda_kernels.norm.forward import rms_norm_kernel
from cuda_kernels.norm.rows import THREADS, RowLayout, cast_row_layout
from cuda_kernels.norm.statistics import (
    NormSpec,
    normalized_loader,
    statistics_of_long_rows_kernel,
    statistics_of_rows_kernel,
)
from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.cast_cuda import (
    CastOutputs,
    CastVariant,
    cast_launches,
    variant_key,
    variant_of,
    with_kernel_strides,
)
from lightning_fp8.ops.checks import DTYPE_NAMES
from lightning_fp8.ops.column_sums import ColumnSums, num_block_sums
from lightning_fp8.ops.memory import ALIGNMENT, PlainKey, TensorKey, allocator, empty_tensor, tensor_key
from lightning_fp8.ops.norm import (
    Norm,
    NormGradients,
    NormOutputs,
    norm_backward_op,
    norm_quantize_op,
    reference_norm,
    reference_norm_backward,
    reference_rms_norm,
    rms_norm_op,
)
from lightning_fp8.ops.plans import check_not_empty, current_device, planned


class NormLaunches:
    """The base of the launches that normalize and cast."""

    def __init__(self, x_key: TensorKey, norm: Norm) -> None:
        self._device = x_key.device
        self._pointer = launch.address_on(x_key.device)
        self._allocate = allocator(x_key.device)
        self._stride = x_key.stride
        self._offset = int(norm.zero_centered)
        self._statistics = (norm.num_statistics, x_key.rows), (x_key.rows, 1), torch.float32

    def _pointers(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None, amax: Tensor | None
    ) -> tuple[Argument, ...]:
        """Pointers to the parameters, the scale and the amax."""
        pointer = self._pointer
        return (
            pointer(weight), 0 if bias is None else pointer(bias), 0 if scale is None else pointer(scale),
            0 if amax is None else pointer(amax),
        )  # fmt: skip

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast,
        scale: Tensor | None, amax: Tensor | None, overflow_counts: Tensor | None,
    ) -> NormOutputs:  # fmt: skip
        """Allocate the results and launch the kernels."""
        raise NotImplementedError


class OneReadNorm(NormLaunches):
    """Computes the statistics, normalizes and casts with one scale, in one pass over x. Rows are held in registers.

    If no scale is given, or if the host does not know that it is nonzero, a second kernel is launched. It returns at
    once if the scale is nonzero; otherwise it reads x again and casts with a scale from the amaxes that the first
    kernel stored. If the transposed operand is requested, a further kernel transposes the FP8 codes.
    """

    def __init__(
        self, x_key: TensorKey, spec: NormSpec, norm: Norm, row_layout: RowLayout, variant: CastVariant
    ) -> None:
        super().__init__(x_key, norm)
        cast, device = variant.cast, x_key.device
        fp8 = cast.float8.name.lower()
        self._outputs = CastOutputs(device, cast, x_key.rows, x_key.columns)
        self._transpose: Callable[..., None] | None = None
        strides = self._outputs.strides
        if cast.columnwise:
            self._transpose = launch.bind(
                transpose_kernel(4), num_tiles(x_key.rows, x_key.columns), device, ("codes", "stride", "out"),
                rows=x_key.rows, columns=x_key.columns, out_stride=strides.out_t_stride,
            )  # fmt: skip
        kernel = normalize_kernel(spec, fp8, row_layout, variant.has_amax)
        num_groups = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
        blocks = min(num_groups, kernel.min_blocks_per_sm * launch.multiprocessors(device))
        stride = strides.out_stride
        scalars = x_key.rows, x_key.columns, float(self._offset), norm.eps
        self._normalize = launch.Launch(kernel, blocks, (*scalars, stride), device).run
        self._cast_again: Callable[..., None] | None = None
        self._block_amaxes = (blocks,), (1,), torch.float32
        if not variant.scale_is_known:
            kernel = cast_normalized_kernel(spec, fp8, row_layout)
            scalars = x_key.rows, x_key.columns, float(self._offset), blocks
            self._cast_again = launch.Launch(
                kernel, blocks, (*scalars, *variant.current_scaling.values(), stride), device
            ).run

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast,
        scale: Tensor | None, amax: Tensor | None, overflow_counts: Tensor | None,
    ) -> NormOutputs:  # fmt: skip
        pointer = self._pointer
        cast_again = self._cast_again
        weight_ptr, bias_ptr, scale_ptr, amax_ptr = self._pointers(weight, bias, scale, amax)
        outputs = data, scale_inv, data_t, _ = self._outputs.allocate()
        statistics = self._allocate(*self._statistics)
        block_amax_ptr: Argument = 0
        if cast_again is not None:
            block_amaxes = self._allocate(*self._block_amaxes)
            block_amax_ptr = pointer(block_amaxes)
        inputs = pointer(x), self._stride, weight_ptr, bias_ptr, pointer(statistics), scale_ptr, block_amax_ptr
        results = pointer(data), pointer(scale_inv)
        self._normalize(*inputs, amax_ptr, *results)
        if cast_again is not None:
            cast_again(*inputs, *results)
        if self._transpose is not None:
            self._transpose(pointer(data), self._outputs.strides.out_stride, pointer(data_t))
        return NormOutputs(*outputs, statistics)


class TwoReadNorm(NormLaunches):
    """Computes statistics in a first pass over x, and casts in any layout in a second pass."""

    def __init__(
        self,
        x_key: TensorKey,
        spec: NormSpec,
        norm: Norm,
        row_layout: RowLayout | None,
        aligned: bool,
        variant: CastVariant,
    ) -> None:
        super().__init__(x_key, norm)
        device = x_key.device
        if row_layout:
            kernel = statistics_of_rows_kernel(spec.dtype, spec.has_mean, row_layout)
            blocks = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
        else:
            kernel = statistics_of_long_rows_kernel(spec.dtype, spec.has_mean, x_key.is_vectorizable(4))
            blocks = x_key.rows
        self._find_statistics = launch.Launch(kernel, blocks, (x_key.rows, x_key.columns, norm.eps), device).run
        loader = normalized_loader(spec, aligned)
        self._cast = cast_launches(variant.cast.layout)(device, loader, x_key.rows, x_key.columns, variant).cast

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast,
        scale: Tensor | None, amax: Tensor | None, overflow_counts: Tensor | None,
    ) -> NormOutputs:  # fmt: skip
        pointer = self._pointer
        stride = self._stride
        weight_ptr, bias_ptr, _, _ = self._pointers(weight, bias, None, None)
        statistics = self._allocate(*self._statistics)
        x_ptr, statistics_ptr = pointer(x), pointer(statistics)
        self._find_statistics(x_ptr, stride, statistics_ptr)
        loader_args = x_ptr, stride, weight_ptr, bias_ptr, statistics_ptr, self._offset
        return NormOutputs(*self._cast(loader_args, scale, amax, overflow_counts), statistics)


def norm_on_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, cast: Cast,
    scale: Tensor | None, amax: Tensor | None, overflow_counts: Tensor | None,
) -> NormOutputs:  # fmt: skip
    """Normalize and cast."""
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    run = _plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), weight.dtype,
        (weight.data_ptr() | (0 if bias is None else bias.data_ptr())) % ALIGNMENT, bias is not None,
        norm, variant_key(cast, scale, amax, overflow_counts),
    )  # fmt: skip
    return run(x, weight, bias, norm, cast, scale, amax, overflow_counts)  # type: ignore[no-any-return]


@planned(fallback=with_kernel_strides(reference_norm, -4), name="norm")
def _plan(
    device: torch.device,
    x_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    parameters_misalignment: int,
    has_bias: bool,
    norm: Norm,
    variant_key: Any,
) -> Callable[..., Any]:
    """Plan for x and its parameters. ``parameters_misalignment`` is the bitwise OR of the parameters' misalignments."""
    x_key = TensorKey(*x_plain_key, device)
    x_key = x_key._replace(misalignment=x_key.misalignment | parameters_misalignment)
    weight_key = TensorKey(weight_dtype, x_key.shape[1:], (1,), x_key.misalignment, device)
    variant = variant_of(variant_key)
    check_not_empty(x_key.shape)
    if not x_key.has_contiguous_rows:
        return lambda x, *args: norm_on_cuda(x.contiguous(), *args)
    cast = variant.cast
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], not norm.rms, has_bias)
    aligned = x_key.is_vectorizable(4) and weight_key.is_vectorizable(4)
    row_layout = None
    if x_key.is_vectorizable(8, ALIGNMENT) and weight_key.is_vectorizable(8, ALIGNMENT):
        row_layout = cast_row_layout(spec.dtype, x_key.columns)
    one_scale = cast.layout.has_one_scale and not variant.has_overflow_counts
    launches: NormLaunches
    if row_layout and one_scale and cast.rowwise:
        launches = OneReadNorm(x_key, spec, norm, row_layout, variant)
    else:
        launches = TwoReadNorm(x_key, spec, norm, row_layout, aligned, variant)
    return launches.run


def norm_backward_on_cuda(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: Norm, bias_gradient: bool
) -> NormGradients:
    """The gradients of a norm."""
    if not weight.is_contiguous():
        weight = weight.contiguous()
    run = _backward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), weight.dtype,
        weight.data_ptr() % ALIGNMENT, norm, bias_gradient,
    )  # fmt: skip
    return run(dy, x, weight, statistics, norm, bias_gradient)


class NormBackwardLaunches:
    """The launches that compute dx and partial sums over rows, and reduce the partial sums."""

    def __init__(
        self, x_key: TensorKey, dy_key: TensorKey, weight_key: TensorKey, norm: Norm, bias_gradient: bool
    ) -> None:
        spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_key.dtype], not norm.rms, bias_gradient)
        device, inputs, dy_dtype = x_key.device, (x_key, dy_key, weight_key), DTYPE_NAMES[dy_key.dtype]
        row_layout = None
        if all(key.is_vectorizable(8, 16) for key in inputs):
            row_layout = backward_row_layout((spec.dtype, dy_dtype), x_key.columns, spec.has_mean)
        if row_layout:
            kernel = norm_backward_kernel(spec, dy_dtype, row_layout)
        else:
            kernel = long_norm_backward_kernel(spec, dy_dtype, all(key.is_vectorizable(4) for key in inputs))
        blocks = num_block_sums(kernel, x_key.rows, device)
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._dx = (x_key.rows, x_key.columns), (x_key.columns, 1), x_key.dtype
        self._dweight = (x_key.columns,), (1,), weight_key.dtype
        self._strides = x_key.stride, dy_key.stride
        self._no_bias = None if bias_gradient else empty_tensor(device, weight_key.dtype)
        scalars = x_key.rows, x_key.columns, float(norm.zero_centered)
        self._run = launch.Launch(kernel, blocks, scalars, device).run
        self._sums = ColumnSums(device, blocks, x_key.columns, weight_key.dtype, num_sets=1 + bias_gradient)

    def run(
        self, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: Norm, bias_gradient: bool
    ) -> NormGradients:
        pointer = self._pointer
        allocate = self._allocate
        sums = self._sums
        x_stride, dy_stride = self._strides
        dx = allocate(*self._dx)
        dweight = allocate(*self._dweight)
        dbias = self._no_bias
        if dbias is None:
            dbias = allocate(*self._dweight)
        partials = sums.partials()
        partials_ptr, stride = pointer(partials), sums.stride
        self._run(
            pointer(x), x_stride, pointer(dy), dy_stride, pointer(weight), pointer(statistics), pointer(dx),
            partials_ptr, stride,
        )  # fmt: skip
        sums.reduce(partials_ptr, pointer(dweight), pointer(dbias), stride)
        return NormGradients(dx, dweight, dbias)


@planned(fallback=reference_norm_backward, name="norm_backward")
def _backward_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    dy_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    norm: Norm,
    bias_gradient: bool,
) -> Callable[..., NormGradients]:
    x_key, dy_key = TensorKey(*x_plain_key, device), TensorKey(*dy_plain_key, device)
    misalignment = x_key.misalignment | dy_key.misalignment | weight_misalignment
    x_key, dy_key = x_key._replace(misalignment=misalignment), dy_key._replace(misalignment=misalignment)
    weight_key = TensorKey(weight_dtype, x_key.shape[1:], (1,), misalignment, device)
    check_not_empty(x_key.shape)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, *args: norm_backward_on_cuda(dy.contiguous(), x.contiguous(), *args)
    return NormBackwardLaunches(x_key, dy_key, weight_key, norm, bias_gradient).run


def rms_norm_on_cuda(
    x: Tensor, weight: Tensor, norm: Norm, dtype: torch.dtype, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """RMSNorm in high precision."""
    if not weight.is_contiguous():
        weight = weight.contiguous()
    run = _rms_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), weight.dtype, weight.data_ptr() % ALIGNMENT,
        norm, dtype, rounds_first,
    )  # fmt: skip
    return run(x, weight, norm, dtype, rounds_first)  # type: ignore[no-any-return]


@planned(fallback=reference_rms_norm, name="rms_norm")
def _rms_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    norm: Norm,
    dtype: torch.dtype,
    rounds_first: bool,
) -> Callable[..., Any]:
    x_key = TensorKey(*x_plain_key, device)
    x_key = x_key._replace(misalignment=x_key.misalignment | weight_misalignment)
    check_not_empty(x_key.shape)
    if not x_key.has_contiguous_rows:
        return lambda x, *args: rms_norm_on_cuda(x.contiguous(), *args)
    weight_key = TensorKey(weight_dtype, x_key.shape[1:], (1,), x_key.misalignment, device)
    row_layout = cast_row_layout(DTYPE_NAMES[x_key.dtype], x_key.columns)
    if row_layout is None or not (x_key.is_vectorizable(8, ALIGNMENT) and weight_key.is_vectorizable(8, ALIGNMENT)):
        raise KernelError(
            f"rms_norm has no kernel for {x_key.columns} columns of {x_key.dtype}, which must be a multiple of 8, at "
            f"most 16,384, and aligned to {ALIGNMENT} bytes"
        )
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], False, False)
    kernel = rms_norm_kernel(spec, DTYPE_NAMES[dtype], rounds_first, row_layout)
    num_groups = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
    blocks = min(num_groups, kernel.min_blocks_per_sm * launch.multiprocessors(device))
    scalars = x_key.rows, x_key.columns, float(norm.zero_centered), norm.eps
    launch_norm = launch.Launch(kernel, blocks, scalars, device).run
    pointer, allocate, stride = launch.address_on(device), allocator(device), x_key.stride
    out = (x_key.rows, x_key.columns), (x_key.columns, 1), dtype
    of_rows = (1, x_key.rows), (x_key.rows, 1), torch.float32

    def run(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        y, statistics = allocate(*out), allocate(*of_rows)
        launch_norm(pointer(x), stride, pointer(weight), pointer(statistics), pointer(y))
        return y, statistics

    return run


rms_norm_op.implement("cuda", rms_norm_on_cuda)
norm_quantize_op.implement("cuda", norm_on_cuda)
norm_backward_op.implement("cuda", norm_backward_on_cuda)
