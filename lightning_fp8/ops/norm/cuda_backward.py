"""``norm_backward`` on CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.host import launch
from cuda_kernels.norm.backward import backward_row_layout, long_norm_backward_kernel, norm_backward_kernel
from cuda_kernels.norm.statistics import NormSpec
from lightning_fp8.ops.core.alignment import ALIGNMENT
from lightning_fp8.ops.core.allocation import allocator, empty_tensor
from lightning_fp8.ops.core.checks import CheckedAddresses, require, require_contiguous
from lightning_fp8.ops.core.column_sums import ColumnSums, num_block_sums
from lightning_fp8.ops.core.dispatch import check_not_empty, current_device, planned
from lightning_fp8.ops.core.options import DTYPE_NAMES, HIGH_PRECISION
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.core.tensor_keys import PlainKey, TensorKey, tensor_key
from lightning_fp8.ops.norm import reference
from lightning_fp8.ops.norm.schema import NormOptions, check_parameters, parse_norm_options

Gradients = tuple[Tensor, Tensor, Tensor]
"""``dx [R, K]``, ``dweight [K]`` and ``dbias [K]``; an empty one if it was not asked for."""


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, options_text: str) -> Gradients:
    """See :mod:`lightning_fp8.ops.norm.schema`."""
    if not weight.is_contiguous():
        weight = weight.contiguous()
    return _plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), tensor_key(dy), weight.dtype,
        weight.data_ptr() % ALIGNMENT, options_text,
    )(dy, x, weight, statistics, options_text)  # fmt: skip


class NormBackwardLaunches:
    """The launches that compute dx and partial sums over rows, and add those up."""

    def __init__(self, x: TensorKey, dy: TensorKey, weight: TensorKey, options: NormOptions) -> None:
        spec = NormSpec(DTYPE_NAMES[x.dtype], DTYPE_NAMES[weight.dtype], not options.rms, options.bias_gradient)
        device, inputs, dy_dtype = x.device, (x, dy, weight), DTYPE_NAMES[dy.dtype]
        row_layout = None
        if all(key.is_vectorizable(8, 16) for key in inputs):
            row_layout = backward_row_layout((spec.dtype, dy_dtype), x.columns)
        if row_layout:
            kernel = norm_backward_kernel(spec, dy_dtype, row_layout)
        else:
            kernel = long_norm_backward_kernel(spec, dy_dtype, all(key.is_vectorizable(4) for key in inputs))
        blocks = num_block_sums(kernel, x.rows, device)
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._checked = CheckedAddresses(device)
        self._device = device
        self._statistics_shape = options.num_statistics, x.rows
        self._dx = (x.rows, x.columns), (x.columns, 1), x.dtype
        self._dweight = (x.columns,), (1,), weight.dtype
        self._strides = x.stride, dy.stride
        self._no_bias = None if options.bias_gradient else empty_tensor(device, weight.dtype)
        scalars = x.rows, x.columns, float(options.zero_centered)
        self._run = launch.Launch(kernel, blocks, scalars, device).run
        self._sums = ColumnSums(device, blocks, x.columns, weight.dtype, num_sets=1 + options.bias_gradient)

    def run(self, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, options_text: str) -> Gradients:
        pointer = self._pointer
        allocate = self._allocate
        sums = self._sums
        x_stride, dy_stride = self._strides
        weight_ptr, statistics_ptr = pointers = pointer(weight), pointer(statistics)
        if pointers not in self._checked:
            check_parameters(x.shape[1:], self._device, weight)
            require_contiguous("statistics", statistics)
            require("statistics", statistics, torch.float32, self._statistics_shape, self._device)
            self._checked.keep(pointers)
        dx = allocate(*self._dx)
        dweight = allocate(*self._dweight)
        dbias = self._no_bias
        if dbias is None:
            dbias = allocate(*self._dweight)
        partials = sums.partials()
        partials_ptr, stride = pointer(partials), sums.stride
        self._run(
            pointer(x), x_stride, pointer(dy), dy_stride, weight_ptr, statistics_ptr, pointer(dx), partials_ptr, stride
        )  # fmt: skip
        sums.reduce(partials_ptr, pointer(dweight), pointer(dbias), stride)
        return dx, dweight, dbias


@planned(fallback=reference.norm_backward)
def _plan(
    device: torch.device,
    x_key: PlainKey,
    dy_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    options_text: str,
) -> Callable[..., Gradients]:
    x, dy = TensorKey(*x_key, device), TensorKey(*dy_key, device)
    misalignment = x.misalignment | dy.misalignment | weight_misalignment
    x, dy = x._replace(misalignment=misalignment), dy._replace(misalignment=misalignment)
    weight = TensorKey(weight_dtype, x.shape[1:], (1,), misalignment, device)
    check_parameters(x.shape[1:], device, weight)
    require("dy", dy, HIGH_PRECISION, x.shape, device)
    check_not_empty(x.shape)
    if not (x.has_contiguous_rows and dy.has_contiguous_rows):
        return lambda dy, x, *args: norm_backward(dy.contiguous(), x.contiguous(), *args)
    return NormBackwardLaunches(x, dy, weight, parse_norm_options(options_text)).run


implement("norm_backward", "cuda", norm_backward)
