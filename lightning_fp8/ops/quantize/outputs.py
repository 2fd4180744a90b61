"""The four results of a cast of ``[rows, columns]``: codes and scales of x, and of xᵀ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.core.alignment import operand_allocations
from lightning_fp8.ops.core.allocation import Allocation, copy_bits, maker
from lightning_fp8.ops.core.dispatch import Op
from lightning_fp8.ops.quantize.options import QuantizeOptions, parse_quantize_options

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""``data``, ``scale_inv``, and the same of the transposed copy; what was not asked for is empty."""


def output_allocations(options: QuantizeOptions, rows: int, columns: int) -> tuple[Allocation, ...]:
    """The memory of the results, as kernels lay them out."""

    def describe_operand(r: int, k: int, transposed: bool) -> tuple[Allocation, Allocation]:
        return operand_allocations(options.layout, options.float8.dtype, r, k)

    return _allocations(options, rows, columns, describe_operand)


def reference_allocations(options: QuantizeOptions, rows: int, columns: int) -> tuple[Allocation, ...]:
    """The memory of the results, as the reference lays them out: codes in x's order, so that those of xᵀ are a view."""

    def describe_operand(r: int, k: int, transposed: bool) -> tuple[Allocation, Allocation]:
        dtype = options.float8.dtype
        data = Allocation.contiguous((k, r), dtype).t() if transposed else Allocation.contiguous((r, k), dtype)
        return data, Allocation.contiguous(options.layout.scale_shape(r, k), options.layout.scale_dtype)

    return _allocations(options, rows, columns, describe_operand)


def _allocations(
    options: QuantizeOptions,
    rows: int,
    columns: int,
    describe_operand: Callable[[int, int, bool], Sequence[Allocation]],
) -> tuple[Allocation, ...]:
    absent = Allocation.absent(options.float8.dtype), Allocation.absent(options.layout.scale_dtype)
    rowwise_copy = describe_operand(rows, columns, False) if options.rowwise else absent
    columnwise_copy = describe_operand(columns, rows, True) if options.columnwise else absent
    if options.layout.has_one_scale:  # which serves both, and is there where neither is asked for
        return rowwise_copy[0], Allocation((), (), options.layout.scale_dtype), columnwise_copy[0], absent[1]
    return *rowwise_copy, *columnwise_copy


def fake_outputs(x: Tensor, options: QuantizeOptions, rows: int, columns: int) -> Outputs:
    """The results of a cast of ``[rows, columns]`` on the device of ``x``, uninitialized."""
    allocations = output_allocations if x.device.type == "cuda" else reference_allocations
    data, scale_inv, data_t, scale_inv_t = (
        allocation.empty(x.device) for allocation in allocations(options, rows, columns)
    )
    return data, scale_inv, data_t, scale_inv_t


class OutputStrides(NamedTuple):
    """The strides of a cast's results in elements, by the names of kernels' parameters; 0 of what has none.

    Attributes:
        out_stride, out_t_stride: from row to row of the codes, of x's operand and of xᵀ's.
        out_scale_inv_stride, out_t_scale_inv_stride: of the scales, from block to block along K, or else from row to
            row.
    """

    out_stride: int
    out_scale_inv_stride: int
    out_t_stride: int
    out_t_scale_inv_stride: int


class CastOutputs:
    """The results of a cast on a device: described once, allocated at each call.

    Attributes:
        strides: of the four results.
    """

    def __init__(self, device: torch.device, options: QuantizeOptions, rows: int, columns: int) -> None:
        allocations = output_allocations(options, rows, columns)
        self._makers = tuple(maker(device, allocation) for allocation in allocations)
        along = 1 if options.layout.scale_major == "mn" else 0
        strides = (
            allocation.strides[dim] if len(allocation.shape) == 2 else 0
            for allocation, dim in zip(allocations, (0, along, 0, along))
        )
        self.strides = OutputStrides(*strides)

    def allocate(self) -> Outputs:
        """Allocate the four tensors on the current device."""
        make_data, make_scale_inv, make_data_t, make_scale_inv_t = self._makers
        return make_data(), make_scale_inv(), make_data_t(), make_scale_inv_t()


def with_kernel_strides(reference_op: Op) -> Op:
    """An op ``(*inputs, options_text, io)`` of the reference, with its operands copied into kernels' layout."""

    def op(*args: Any) -> tuple[Tensor, ...]:
        options = parse_quantize_options(args[-2])
        results = reference_op(*args)
        data, _, data_t, _ = results[:4]
        rows, columns = data.shape if options.rowwise else data_t.t().shape if options.columnwise else (0, 0)
        copies = [allocation.empty(data.device) for allocation in output_allocations(options, rows, columns)]
        for result, copy in zip(results, copies):
            copy_bits(result, copy)
        return (*copies, *results[4:])

    return op
