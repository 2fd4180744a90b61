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

    def __init__(self, x_key: TensorKey, dy_key: TensorKey, weight_key: TensorKey, norm_options: NormOptions) -> None:
        spec = NormSpec(
            DTYPE_NAMES[x_key.dtype], DTYPE_NAMES[weight_key.dtype], not norm_options.rms, norm_options.bias_gradient
        )
        device, inputs, dy_dtype = x_key.device, (x_key, dy_key, weight_key), DTYPE_NAMES[dy_key.dtype]
        row_layout = None
        if all(key.is_vectorizable(8, 16) for key in inputs):
            row_layout = backward_row_layout((spec.dtype, dy_dtype), x_key.columns)
        if row_layout:
            kernel = norm_backward_kernel(spec, dy_dtype, row_layout)
        else:
            kernel = long_norm_backward_kernel(spec, dy_dtype, all(key.is_vectorizable(4) for key in inputs))
        blocks = num_block_sums(kernel, x_key.rows, device)
        self._pointer = launch.address_on(device)
        self._allocate = allocator(device)
        self._checked = CheckedAddresses(device)
        self._device = device
        self._statistics_shape = norm_options.num_statistics, x_key.rows
        self._dx = (x_key.rows, x_key.columns), (x_key.columns, 1), x_key.dtype
        self._dweight = (x_key.columns,), (1,), weight_key.dtype
        self._strides = x_key.stride, dy_key.stride
        self._no_bias = None if norm_options.bias_gradient else empty_tensor(device, weight_key.dtype)
        scalars = x_key.rows, x_key.columns, float(norm_options.zero_centered)
        self._run = launch.Launch(kernel, blocks, scalars, device).run
        self._sums = ColumnSums(
            device, blocks, x_key.columns, weight_key.dtype, num_sets=1 + norm_options.bias_gradient
        )

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
    x_plain_key: PlainKey,
    dy_plain_key: PlainKey,
    weight_dtype: torch.dtype,
    weight_misalignment: int,
    options_text: str,
) -> Callable[..., Gradients]:
    x_key, dy_key = TensorKey(*x_plain_key, device), TensorKey(*dy_plain_key, device)
    misalignment = x_key.misalignment | dy_key.misalignment | weight_misalignment
    x_key, dy_key = x_key._replace(misalignment=misalignment), dy_key._replace(misalignment=misalignment)
    weight_key = TensorKey(weight_dtype, x_key.shape[1:], (1,), misalignment, device)
    check_parameters(x_key.shape[1:], device, weight_key)
    require("dy", dy_key, HIGH_PRECISION, x_key.shape, device)
    check_not_empty(x_key.shape)
    if not (x_key.has_contiguous_rows and dy_key.has_contiguous_rows):
        return lambda dy, x, *args: norm_backward(dy.contiguous(), x.contiguous(), *args)
    return NormBackwardLaunches(x_key, dy_key, weight_key, parse_norm_options(options_text)).run


implement("norm_backward", "cuda", norm_backward)
