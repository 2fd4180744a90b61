"""How an FP8 GEMM operand lies in memory: the alignment that kernels want, and operands allocated so.

Casts write operands as :func:`operand_allocations` says; a GEMM takes any that :func:`is_aligned`, and copies others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.ops.core.allocation import Allocation
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from lightning_fp8.ops.core.tensor_keys import TensorKey

ALIGNMENT = 16
"""Bytes at multiples of which rows of codes begin: TMA, and vector loads, want no less."""


def is_aligned(layout: Layout, data: TensorKey, scale_inv: TensorKey) -> bool:
    """Whether each row of an operand's codes, and each line of its scales, starts where a kernel's copies can start.

    Args:
        data: the key of the codes ``[R, K]``, one byte each: rows are contiguous and begin at multiples of 16 bytes.
        scale_inv: its key. MN-major scales of a block along K are contiguous and begin at multiples of 16
            bytes; K-major ones have contiguous rows; one scale for each row is contiguous.
    """
    if not data.has_contiguous_rows or data.stride <= 0 or data.stride % ALIGNMENT or data.misalignment:
        return False
    strides = scale_inv.strides
    if layout.scale_major == "mn":
        bytes_per_line = strides[1] * layout.scale_dtype.itemsize
        return strides[0] == 1 and bytes_per_line % ALIGNMENT == 0 and not scale_inv.misalignment
    if layout.scales_along_k:
        return strides[1] == 1
    return layout.has_one_scale or strides[0] == 1 or data.rows == 1


def operand_allocations(layout: Layout, dtype: torch.dtype, rows: int, columns: int) -> tuple[Allocation, Allocation]:
    """The memory of ``data`` and ``scale_inv`` of an ``[rows, columns]`` GEMM operand, as kernels write and read it.

    Rows of ``data`` begin at multiples of 16 bytes; zeros fill the gap. Scales that are MN-major begin a row of blocks
    at a multiple of 16 bytes.
    """
    stride = ceil_div(columns, ALIGNMENT) * ALIGNMENT
    data = Allocation((rows, stride), (stride, 1), dtype, None if stride == columns else columns)
    shape = layout.scale_shape(rows, columns)
    if layout.has_one_scale:
        return data, Allocation.contiguous(shape, layout.scale_dtype)
    per_line = ALIGNMENT // layout.scale_dtype.itemsize
    strides = (1, ceil_div(rows, per_line) * per_line) if layout.scale_major == "mn" else (shape[1], 1)
    return data, Allocation(shape, strides, layout.scale_dtype)


def empty_operand(
    device: torch.device, layout: Layout, dtype: torch.dtype, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Allocate ``data`` and ``scale_inv`` as :func:`operand_allocations` says."""
    data, scale_inv = operand_allocations(layout, dtype, rows, columns)
    return data.empty(device), scale_inv.empty(device)
