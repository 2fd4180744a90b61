"""Norms on CUDA tensors, and their gradients. They are planned once for each key of tensors.

There are two ways to normalize and cast: :func:`one_read_norm` and :func:`two_read_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_kernels.casts.transpose import transpose_kernel
from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.device.tile import num_tiles
from cuda_kernels.host import launch
from cuda_kernels.host.launch import Argument
from cuda_kernels.kernel import Kernel, KernelError
from cuda_kernels.norm.backward import backward_row_layout, long_norm_backward_kernel, norm_backward_kernel
from cuda_kernels.norm.cast import cast_normalized_kernel, normalize_kernel, rms_norm_kernel
from cuda_kernels.norm.rows import THREADS, RowLayout, cast_row_layout
from cuda_kernels.norm.statistics import (
    NormSpec,
    normalized_loader,
    statistics_of_long_rows_kernel,
    statistics_of_rows_kernel,
)
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
from lightning_fp8.ops.plans import Run, check_not_empty, current_device, planned


def one_read_norm(x_key: TensorKey, spec: NormSpec, norm: Norm, row_layout: RowLayout, variant: CastVariant) -> Run:
    """Computes the statistics, normalizes and casts with one scale, in one pass over x. Rows are held in registers.

    If no scale is given, or if the host does not know that it is nonzero, a second kernel is launched. It returns at
    once if the scale is nonzero; otherwise it reads x again and casts with a scale from the amaxes that the first
    kernel stored. If the transposed operand is requested, a further kernel transposes the FP8 codes.
    """
    cast, device = variant.cast, x_key.device
    fp8 = cast.float8.name.lower()
    made = CastOutputs(device, cast, x_key.rows, x_key.columns)
    out_stride = made.strides["out_stride"]
    transpose = cast_again = None
    if cast.columnwise:
        transpose = launch.bind(
            transpose_kernel(4), num_tiles(x_key.rows, x_key.columns), device, ("codes", "stride", "out"),
            rows=x_key.rows, columns=x_key.columns, out_stride=made.strides["out_t_stride"],
        )  # fmt: skip
    kernel = normalize_kernel(spec, fp8, row_layout, variant.has_amax)
    blocks = _blocks_of_rows(kernel, x_key, row_layout)
    shape = x_key.rows, x_key.columns, float(norm.zero_centered)
    normalize = launch.Launch(kernel, blocks, (*shape, norm.eps, out_stride), device).run
    if not variant.scale_is_known:
        scalars = *shape, blocks, *variant.current_scaling.values(), out_stride
        cast_again = launch.Launch(cast_normalized_kernel(spec, fp8, row_layout), blocks, scalars, device).run
    pointer, allocate = launch.address_on(device), allocator(device)
    x_stride, of_rows, of_block_amaxes = x_key.stride, _statistics(norm, x_key), ((blocks,), (1,), torch.float32)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> NormOutputs:
        scale, amax = args[-2:]
        outputs = data, scale_inv, data_t, _ = made.allocate()
        statistics = allocate(*of_rows)
        block_amax_ptr: Argument = 0
        if cast_again is not None:
            block_amaxes = allocate(*of_block_amaxes)
            block_amax_ptr = pointer(block_amaxes)
        inputs = (
            pointer(x), x_stride, pointer(weight), 0 if bias is None else pointer(bias), pointer(statistics),
            0 if scale is None else pointer(scale), block_amax_ptr,
        )  # fmt: skip
        results = pointer(data), pointer(scale_inv)
        normalize(*inputs, 0 if amax is None else pointer(amax), *results)
        if cast_again is not None:
            cast_again(*inputs, *results)
        if transpose is not None:
            transpose(results[0], out_stride, pointer(data_t))
        return NormOutputs(*outputs, statistics)

    return run


def two_read_norm(
    x_key: TensorKey, spec: NormSpec, norm: Norm, row_layout: RowLayout | None, aligned: bool, variant: CastVariant
) -> Run:
    """Computes statistics in a first pass over x, and casts in any layout in a second pass."""
    device = x_key.device
    if row_layout:
        kernel = statistics_of_rows_kernel(spec.dtype, spec.has_mean, row_layout)
        blocks = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
    else:
        kernel = statistics_of_long_rows_kernel(spec.dtype, spec.has_mean, x_key.is_vectorizable(4))
        blocks = x_key.rows
    find_statistics = launch.Launch(kernel, blocks, (x_key.rows, x_key.columns, norm.eps), device).run
    loader = normalized_loader(spec, aligned)
    cast = cast_launches(variant.cast.layout)(device, loader, x_key.rows, x_key.columns, variant).cast
    pointer, allocate = launch.address_on(device), allocator(device)
    stride, of_rows, offset = x_key.stride, _statistics(norm, x_key), int(norm.zero_centered)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> NormOutputs:
        statistics = allocate(*of_rows)
        x_ptr, statistics_ptr = pointer(x), pointer(statistics)
        find_statistics(x_ptr, stride, statistics_ptr)
        bias_ptr = 0 if bias is None else pointer(bias)
        loader_args = x_ptr, stride, pointer(weight), bias_ptr, statistics_ptr, offset
        return NormOutputs(*cast(loader_args, *args[-2:]), statistics)

    return run


def _blocks_of_rows(kernel: Kernel, x_key: TensorKey, row_layout: RowLayout) -> int:
    """The number of blocks that run concurrently; each of these n blocks processes every n-th group of rows."""
    num_groups = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
    return min(num_groups, kernel.min_blocks_per_sm * launch.multiprocessors(x_key.device))


def _statistics(norm: Norm, x_key: TensorKey) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return (norm.num_statistics, x_key.rows), (x_key.rows, 1), torch.float32


def _keys(device: torch.device, weight_dtype: torch.dtype, misalignment: int, *keys: PlainKey) -> list[TensorKey]:
    """The keys of tensors, and of their parameters, all with the bitwise OR of all misalignments."""
    check_not_empty(keys[0][1])
    for key in keys:
        misalignment |= key[3]
    weight_key = TensorKey(weight_dtype, keys[0][1][1:], (1,), misalignment, device)
    return [*(TensorKey(*key, device)._replace(misalignment=misalignment) for key in keys), weight_key]


def norm_on_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> NormOutputs:
    """Normalize and cast."""
    norm, cast, *observed = args
    if not weight.is_contiguous() or not (bias is None or bias.is_contiguous()):
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    run = _plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), weight.dtype,
        (weight.data_ptr() | (0 if bias is None else bias.data_ptr())) % ALIGNMENT, bias is not None,
        norm, variant_key(cast, *observed),
    )  # fmt: skip
    return run(x, weight, bias, *args)  # type: ignore[no-any-return]


@planned(fallback=with_kernel_strides(reference_norm), name="norm")
def _plan(
    device: torch.device,
    x_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    misalignment: int,
    has_bias: bool,
    norm: Norm,
    variant_key: Any,
) -> Run:
    x_key, weight_key = _keys(device, weight_dtype, misalignment, x_plain_key)
    if not x_key.has_contiguous_rows:
        return lambda x, *args: norm_on_cuda(x.contiguous(), *args)
    variant = variant_of(variant_key)
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], not norm.rms, has_bias)
    row_layout = None
    if x_key.is_vectorizable(8, ALIGNMENT) and weight_key.is_vectorizable(8, ALIGNMENT):
        row_layout = cast_row_layout(spec.dtype, x_key.columns)
    if row_layout and variant.cast.layout.has_one_scale and variant.cast.rowwise:
        return one_read_norm(x_key, spec, norm, row_layout, variant)
    aligned = x_key.is_vectorizable(4) and weight_key.is_vectorizable(4)
    return two_read_norm(x_key, spec, norm, row_layout, aligned, variant)


def norm_backward_on_cuda(dy: Tensor, x: Tensor, weight: Tensor, *args: Any) -> NormGradients:
    """The gradients of a norm."""
    weight = weight if weight.is_contiguous() else weight.contiguous()
    _, norm, bias_gradient = args
    run = _backward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), weight.dtype,
        weight.data_ptr() % ALIGNMENT, norm, bias_gradient,
    )  # fmt: skip
    return run(dy, x, weight, *args)  # type: ignore[no-any-return]


@planned(fallback=reference_norm_backward, name="norm_backward")
def _backward_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    dy_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    norm: Norm,
    bias_gradient: bool,
) -> Run:
    """The launches that compute dx and partial sums over rows, and reduce the partial sums."""
    keys = x_key, dy_key, _ = _keys(device, weight_dtype, weight_misalignment, x_plain_key, dy_plain_key)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, *args: norm_backward_on_cuda(dy.contiguous(), x.contiguous(), *args)
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], not norm.rms, bias_gradient)
    dy_dtype, row_layout = DTYPE_NAMES[dy_key.dtype], None
    if all(key.is_vectorizable(8, 16) for key in keys):
        row_layout = backward_row_layout((spec.dtype, dy_dtype), x_key.columns, spec.has_mean)
    if row_layout:
        kernel = norm_backward_kernel(spec, dy_dtype, row_layout)
    else:
        kernel = long_norm_backward_kernel(spec, dy_dtype, all(key.is_vectorizable(4) for key in keys))
    rows, columns = x_key.shape
    blocks = num_block_sums(kernel, rows, device)
    compute = launch.Launch(kernel, blocks, (rows, columns, float(norm.zero_centered)), device).run
    sums = ColumnSums(device, blocks, columns, weight_dtype, num_sets=1 + bias_gradient)
    pointer, allocate = launch.address_on(device), allocator(device)
    of_dx, of_sums = ((rows, columns), (columns, 1), x_key.dtype), ((columns,), (1,), weight_dtype)
    x_stride, dy_stride, no_bias = x_key.stride, dy_key.stride, empty_tensor(device, weight_dtype)

    def run(dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, *_: Any) -> NormGradients:
        dx, dweight = allocate(*of_dx), allocate(*of_sums)
        dbias = allocate(*of_sums) if bias_gradient else no_bias
        partials = sums.partials()
        partials_ptr, stride = pointer(partials), sums.stride
        compute(
            pointer(x), x_stride, pointer(dy), dy_stride, pointer(weight), pointer(statistics), pointer(dx),
            partials_ptr, stride,
        )  # fmt: skip
        sums.reduce(partials_ptr, pointer(dweight), pointer(dbias), stride)
        return NormGradients(dx, dweight, dbias)

    return run


def rms_norm_on_cuda(x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """RMSNorm in high precision."""
    weight = weight if weight.is_contiguous() else weight.contiguous()
    run = _rms_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), weight.dtype, weight.data_ptr() % ALIGNMENT, *options
    )
    return run(x, weight, *options)  # type: ignore[no-any-return]


@planned(fallback=reference_rms_norm, name="rms_norm")
def _rms_plan(
    device: torch.device,
    x_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    norm: Norm,
    dtype: torch.dtype,
    rounds_first: bool,
) -> Run:
    x_key, weight_key = _keys(device, weight_dtype, weight_misalignment, x_plain_key)
    if not x_key.has_contiguous_rows:
        return lambda x, *args: rms_norm_on_cuda(x.contiguous(), *args)
    row_layout = cast_row_layout(DTYPE_NAMES[x_key.dtype], x_key.columns)
    if row_layout is None or not (x_key.is_vectorizable(8, ALIGNMENT) and weight_key.is_vectorizable(8, ALIGNMENT)):
        raise KernelError(
            f"rms_norm has no kernel for {x_key.columns} columns of {x_key.dtype}, which must be a multiple of 8, at "
            f"most 16,384, and aligned to {ALIGNMENT} bytes"
        )
    spec = NormSpec(DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_dtype], False, False)
    kernel = rms_norm_kernel(spec, DTYPE_NAMES[dtype], rounds_first, row_layout)
    scalars = x_key.rows, x_key.columns, float(norm.zero_centered), norm.eps
    launch_norm = launch.Launch(kernel, _blocks_of_rows(kernel, x_key, row_layout), scalars, device).run
    pointer, allocate, stride = launch.address_on(device), allocator(device), x_key.stride
    of_y, of_rows = ((x_key.rows, x_key.columns), (x_key.columns, 1), dtype), _statistics(norm, x_key)

    def run(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        y, statistics = allocate(*of_y), allocate(*of_rows)
        launch_norm(pointer(x), stride, pointer(weight), pointer(statistics), pointer(y))
        return y, statistics

    return run


rms_norm_op.implement("cuda", rms_norm_on_cuda)
norm_quantize_op.implement("cuda", norm_on_cuda)
norm_backward_op.implement("cuda", norm_backward_on_cuda)
