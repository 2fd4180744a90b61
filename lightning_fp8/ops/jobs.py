"""Products as kernels see them: how operands lie, where they have to lie, and the problem that this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops.config import NAMES, parse_scaled_mm_config
from lightning_fp8.ops.schema import empty_operand, operand_layout
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from cuda_kernels.host.gemm_configs import Problem

SCALINGS = {
    (Layout.TENSOR, Layout.TENSOR): "TENSOR",
    (Layout.ROW, Layout.ROW): "ROW",
    (Layout.BLOCK_1X128, Layout.BLOCK_128X128): "BLOCK",
    (Layout.BLOCK_1X128, Layout.BLOCK_1X128): "BLOCKS",
}
"""Pairs of layouts that kernels multiply, by the names of :class:`cuda_kernels.gemm.spec.Scaling`."""

Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int, tuple[int, ...], int]
"""How an operand lies: dtype, shape, strides, its address modulo 16, and of its scales the strides and the address."""


def place_of(data: Tensor, scale: Tensor) -> Place:
    return data.dtype, data.shape, data.stride(), data.data_ptr() % 16, scale.stride(), scale.data_ptr() % 16


class Operand(NamedTuple):
    """A K-major operand ``[rows, k]`` and its scales; ``stride`` is 0 where a row's elements are not side by side."""

    dtype: torch.dtype
    layout: Layout
    rows: int
    k: int
    stride: int
    address: int
    scale_strides: tuple[int, ...]
    scale_address: int

    @classmethod
    def at(cls, place: Place, layout: Layout) -> Operand:
        dtype, (rows, k), strides, address, scale_strides, scale_address = place
        stride = strides[0] if strides[1] == 1 or k == 1 else 0
        return cls(dtype, layout, rows, k, stride, address, scale_strides, scale_address)

    @classmethod
    def promised(cls, layout: Layout, dtype: torch.dtype, rows: int, k: int) -> Operand:
        """As the ops that cast lay it out."""
        data, scales = operand_layout(layout, dtype, rows, k)
        return cls(dtype, layout, rows, k, data.strides[0], 0, scales.strides, 0)

    @property
    def lies_well(self) -> bool:
        """Whether copies of tensors and of scales can begin at each row."""
        if self.stride <= 0 or self.stride % 16 or self.address:
            return False
        strides = self.scale_strides
        if self.layout is Layout.BLOCK_1X128:
            return strides[0] == 1 and strides[1] % 4 == 0 and not self.scale_address
        if self.layout is Layout.ROW:
            return strides[0] == 1 or self.rows == 1
        return self.layout is not Layout.BLOCK_128X128 or strides[1] == 1


def laid_out(data: Tensor, scale: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The operand where kernels read it: itself, or a copy."""
    if Operand.at(place_of(data, scale), layout).lies_well:
        return data, scale
    promised = empty_operand(data.device, layout, data.dtype, *data.shape)
    for tensor, empty in zip((data, scale), promised):
        kind = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
        empty.view(kind).copy_(tensor.view(kind))
    return promised


class Job(NamedTuple):
    """A product of operands that lie well; ``stride``: of the result, in elements."""

    device: torch.device
    problem: Problem
    a: Operand
    b: Operand
    config: str
    stride: int


def job_of(
    device: torch.device,
    a: Operand,
    b: Operand,
    config: str,
    bias: tuple[torch.dtype, int] | None = None,
    out: tuple[int, int] | None = None,
    amax: bool = False,
) -> Job:
    """The product of these operands on ``device``; see :func:`lightning_fp8.ops.gemm._plan`."""
    from cuda_kernels.gemm.spec import GemmSpec, Scaling
    from cuda_kernels.host import launch
    from cuda_kernels.host.gemm_configs import Problem

    _, _, dtype, fast = parse_scaled_mm_config(config)
    format_a, format_b = (float8_of(operand.dtype).name.lower() for operand in (a, b))
    scaling, of_bias = Scaling[SCALINGS[a.layout, b.layout]], None if bias is None else NAMES[bias[0]]
    product = GemmSpec(format_a, format_b, scaling, NAMES[dtype], of_bias, out is not None, not fast, amax)
    stride, address = out or (b.rows, 0)
    aligned = stride * dtype.itemsize % 16 == 0 and address == 0
    even = stride % 2 == b.rows % 2 == 0 and address % (2 * dtype.itemsize) == 0
    even = even and (bias is None or bias[1] % 8 == 0) and b.scale_address % 8 == 0
    card = launch.architecture_of(device), launch.multiprocessors(device)
    return Job(device, Problem(a.rows, b.rows, a.k, product, *card, aligned, even), a, b, config, stride)
