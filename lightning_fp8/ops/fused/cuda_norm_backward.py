"""The gradients of normalizations on CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fp8.ops.config import NAMES
from lightning_fp8.ops.fused import reference
from lightning_fp8.ops.fused.parts import ColumnSums, Place, Results, place_of
from lightning_fp8.ops.fused.schema import parse_norm_config
from lightning_fp8.ops.given import (
    Checked,
    compact,
    lie_of,
    require_beside_a_norm,
    require_gradient,
    require_statistics,
)
from lightning_fp8.ops.operands import allocator, nothing
from lightning_fp8.ops.planning import current_device, planned

if TYPE_CHECKING:
    from cuda_kernels.norm.statistics import Norm


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not weight.is_contiguous():
        weight = weight.contiguous()
    op = _norm_backward_plan(
        x.device, x.is_cuda and current_device(), x.dtype, x.shape, x.stride(), dy.dtype, dy.shape, dy.stride(),
        weight.dtype, (x.data_ptr() | dy.data_ptr() | weight.data_ptr()) % 16, norm,
    )  # fmt: skip
    return op(dy, x, weight, statistics, norm)


class _NormBackward:
    """dx, and partial sums over rows, which a second kernel adds up."""

    def __init__(
        self, device: torch.device, norm: Norm, rows: int, weight: Place, x: Place, dy: Place, offset: float
    ) -> None:
        from cuda_kernels.host import launch
        from cuda_kernels.norm import backward as kernels

        inputs, columns, dy_dtype = (x, dy, weight), x.columns, NAMES[dy.dtype]
        spread = None
        if all(each.comes_in(8, 16) for each in inputs):
            spread = kernels.backward_row_layout((norm.dtype, dy_dtype), columns)
        if spread:
            kernel = kernels.norm_backward_kernel(norm, dy_dtype, spread)
        else:
            aligned = all(each.comes_in(4) for each in inputs)
            kernel = kernels.long_norm_backward_kernel(norm, dy_dtype, aligned)
        blocks = min(rows, kernel.min_blocks_per_sm * launch.multiprocessors(device))
        self._at, self._allocate = launch.address_on(device), allocator(device)
        self._checked, self._device, self._rms = Checked(device), device, not norm.mean
        self._dx = (rows, columns), (columns, 1), x.dtype
        self._dweight = (columns,), (1,), weight.dtype
        self._strides = x.stride, dy.stride
        self._no_bias = None if norm.bias else nothing(device, weight.dtype)
        self._start = launch.Launch(kernel, blocks, (rows, columns, offset), device).start
        self._sums = ColumnSums(device, blocks, columns, weight.dtype, 1 + norm.bias)

    def op(self, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        at, new, sums, (x_stride, dy_stride) = self._at, self._allocate, self._sums, self._strides
        of_weight, of_statistics = addresses = at(weight), at(statistics)
        if addresses not in self._checked.known:
            require_beside_a_norm(x.shape[1:], self._device, lie_of(weight))
            require_statistics(compact("statistics", statistics), self._rms, x.shape[0], self._device)
            self._checked.keep(addresses)
        dx, dweight, dbias = new(*self._dx), new(*self._dweight), self._no_bias
        if dbias is None:
            dbias = new(*self._dweight)
        partials = sums.partials()
        self._start(
            at(x), x_stride, at(dy), dy_stride, of_weight, of_statistics, at(dx), at(partials), sums.stride,
        )  # fmt: skip
        sums.add(partials, dweight, dbias)
        return dx, dweight, dbias


@planned(reference.norm_backward)
def _norm_backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    dy_dtype: torch.dtype,
    dy_shape: Sequence[int],
    dy_strides: Sequence[int],
    weight_dtype: torch.dtype,
    address: int,
    norm: str,
) -> Callable[..., Results]:
    from cuda_kernels.norm.statistics import Norm

    require_beside_a_norm(shape[1:], device, (weight_dtype, shape[1:], device))
    require_gradient((dy_dtype, dy_shape, device), shape, device)
    x, dy = place_of(dtype, shape, strides, address), place_of(dy_dtype, shape, dy_strides, address)
    if x is None or dy is None:
        return lambda dy, x, *args: norm_backward(dy.contiguous(), x.contiguous(), *args)
    kind, weight = parse_norm_config(norm), Place(weight_dtype, shape[1], 0, address)
    of = Norm(NAMES[dtype], NAMES[weight_dtype], not kind.rms, kind.bias)
    return _NormBackward(device, of, shape[0], weight, x, dy, float(kind.zero_centered)).op
