"""The launches of a norm and its cast, planned once for tensors of one key: a class for each way to run them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from cuda_kernels.host import launch
from cuda_kernels.host.launch import Argument
from cuda_kernels.norm.bands import BAND, normalize_bands_kernel
from cuda_kernels.norm.cast import cast_normalized_kernel, normalize_kernel
from cuda_kernels.norm.rows import THREADS, RowLayout
from cuda_kernels.norm.statistics import (
    NormSpec,
    normalized_loader,
    statistics_of_long_rows_kernel,
    statistics_of_rows_kernel,
)
from lightning_fp8.ops.core.allocation import allocator
from lightning_fp8.ops.core.checks import CheckedAddresses
from lightning_fp8.ops.core.tensor_keys import TensorKey
from lightning_fp8.ops.norm.schema import NormOptions, Results, check_parameters
from lightning_fp8.ops.quantize.launches import CastVariant, cast_launches
from lightning_fp8.ops.quantize.outputs import CastOutputs
from lightning_fp8.ops.quantize.schema import NO_IO, CastIO, check_cast_io


class NormLaunches:
    """The launches that normalize and cast; what its subclasses share."""

    def __init__(self, x_key: TensorKey, norm_options: NormOptions) -> None:
        self._device = x_key.device
        self._pointer = launch.address_on(x_key.device)
        self._allocate = allocator(x_key.device)
        self._stride = x_key.stride
        self._offset = int(norm_options.zero_centered)
        self._statistics = (norm_options.num_statistics, x_key.rows), (x_key.rows, 1), torch.float32
        self._checked = CheckedAddresses(x_key.device)
        self._parameter_shape = (x_key.columns,)

    def _pointers(self, weight: Tensor, bias: Tensor | None, io: CastIO) -> tuple[Argument, ...]:
        """Pointers to the parameters, the scale and the amax, once they passed their checks."""
        pointer = self._pointer
        scale, amax, _ = io
        pointers = (
            pointer(weight), 0 if bias is None else pointer(bias), 0 if scale is None else pointer(scale),
            0 if amax is None else pointer(amax),
        )  # fmt: skip
        if pointers not in self._checked:
            check_parameters(self._parameter_shape, self._device, weight, bias)
            check_cast_io(self._device, (scale, amax, None))
            self._checked.keep(pointers)
        return pointers

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, io: CastIO) -> Results:
        """Allocate the results and start the kernels."""
        raise NotImplementedError


class OneReadNorm(NormLaunches):
    """Statistics and the cast from one read of x, whose rows stay in registers: one scale, no transposed operand.

    Where the scale is not given, or may be 0, a second kernel follows, which returns at once unless it is.
    """

    def __init__(
        self, x_key: TensorKey, spec: NormSpec, norm_options: NormOptions, row_layout: RowLayout, variant: CastVariant
    ) -> None:
        super().__init__(x_key, norm_options)
        cast_options, device = variant.options, x_key.device
        fp8 = cast_options.float8.name.lower()
        self._outputs = CastOutputs(device, cast_options, x_key.rows, x_key.columns)
        kernel = normalize_kernel(spec, fp8, row_layout, variant.has_amax)
        num_groups = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
        blocks = min(num_groups, kernel.min_blocks_per_sm * launch.multiprocessors(device))
        stride = self._outputs.strides[0]
        scalars = x_key.rows, x_key.columns, float(self._offset), norm_options.eps
        self._normalize = launch.Launch(kernel, blocks, (*scalars, stride), device).run
        self._cast_again: Callable[..., None] | None = None
        self._block_amaxes = (blocks,), (1,), torch.float32
        if not variant.scale_is_known:
            kernel = cast_normalized_kernel(spec, fp8, row_layout)
            scalars = x_key.rows, x_key.columns, float(self._offset), blocks
            self._cast_again = launch.Launch(kernel, blocks, (*scalars, *variant.current_scaling, stride), device).run

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, io: CastIO) -> Results:
        pointer = self._pointer
        cast_again = self._cast_again
        weight_ptr, bias_ptr, scale_ptr, amax_ptr = self._pointers(weight, bias, io)
        outputs = data, scale_inv, _, _ = self._outputs.allocate()
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
        return *outputs, statistics


class BandNorm(NormLaunches):
    """The statistics of a band of rows, and then its codes, row by row and transposed, in one launch.

    One scale, which is given and not 0.
    """

    def __init__(
        self, x_key: TensorKey, spec: NormSpec, norm_options: NormOptions, aligned: bool, variant: CastVariant
    ) -> None:
        super().__init__(x_key, norm_options)
        cast_options, device = variant.options, x_key.device
        self._outputs = CastOutputs(device, cast_options, x_key.rows, x_key.columns)
        kernel = normalize_bands_kernel(
            spec, aligned, cast_options.float8.name.lower(), cast_options.rowwise, variant.has_amax
        )
        stride, _, stride_t, _ = self._outputs.strides
        scalars = x_key.rows, x_key.columns, norm_options.eps, stride, stride_t
        self._run = launch.Launch(kernel, ceil_div(x_key.rows, BAND), scalars, device).run

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, io: CastIO) -> Results:
        pointer = self._pointer
        weight_ptr, bias_ptr, scale_ptr, amax_ptr = self._pointers(weight, bias, io)
        outputs = data, scale_inv, data_t, _ = self._outputs.allocate()
        statistics = self._allocate(*self._statistics)
        self._run(
            pointer(x), self._stride, weight_ptr, bias_ptr, pointer(statistics), self._offset,
            scale_ptr, amax_ptr, pointer(data), pointer(scale_inv), pointer(data_t),
        )  # fmt: skip
        return *outputs, statistics


class TwoReadNorm(NormLaunches):
    """Statistics, and then any cast, which reads x again."""

    def __init__(
        self,
        x_key: TensorKey,
        spec: NormSpec,
        norm_options: NormOptions,
        row_layout: RowLayout | None,
        aligned: bool,
        variant: CastVariant,
    ) -> None:
        super().__init__(x_key, norm_options)
        device = x_key.device
        if row_layout:
            kernel = statistics_of_rows_kernel(spec.dtype, spec.has_mean, row_layout)
            blocks = ceil_div(x_key.rows * row_layout.threads_per_row, THREADS)
        else:
            kernel = statistics_of_long_rows_kernel(spec.dtype, spec.has_mean, x_key.is_vectorizable(4))
            blocks = x_key.rows
        self._find_statistics = launch.Launch(kernel, blocks, (x_key.rows, x_key.columns, norm_options.eps), device).run
        loader = normalized_loader(spec, aligned)
        self._cast = cast_launches(variant.options.layout)(device, loader, x_key.rows, x_key.columns, variant).cast

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, options_text: str, io: CastIO) -> Results:
        pointer = self._pointer
        stride = self._stride
        weight_ptr, bias_ptr, _, _ = self._pointers(weight, bias, NO_IO)
        statistics = self._allocate(*self._statistics)
        x_ptr, statistics_ptr = pointer(x), pointer(statistics)
        self._find_statistics(x_ptr, stride, statistics_ptr)
        loader_args = x_ptr, stride, weight_ptr, bias_ptr, statistics_ptr, self._offset
        return *self._cast(loader_args, io), statistics
