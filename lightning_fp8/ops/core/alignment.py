"""The alignment that an FP8 GEMM asks of its operands and its result, and what happens where it is missing.

- Operands: :func:`is_aligned_operand`, which our kernels and cuBLASLt ask. Casts write no others
  (:func:`operand_allocations`); where an operand comes from elsewhere, the GEMM multiplies its :func:`aligned_copy`,
  unless nothing but the reference multiplies its layouts, which takes any.
  Sizes may be any: a row's bytes in memory are rounded up to 16, its shape stays ``K``.
- Sizes: ``cublaslt_takes`` of :mod:`cuda_kernels.host.gemm_configs`, which cuBLASLt alone asks. Where it refuses, our
  kernels multiply, or the reference, as :mod:`cuda_kernels.host.gemm_selection` chooses.
- The result: :func:`is_aligned_result` and :func:`has_aligned_pairs`. Otherwise our kernels store it in smaller pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.ops.core.allocation import Allocation, copy_bits
from lightning_fp8.scaled import Layout

if TYPE_CHECKING:
    from lightning_fp8.ops.core.tensor_keys import TensorKey

ALIGNMENT = 16
"""Bytes at multiples of which rows of codes begin: TMA, and vector loads, want no less."""


def is_aligned_operand(layout: Layout, data_key: TensorKey, scale_inv_key: TensorKey) -> bool:
    """Whether each row of an operand's codes, and each line of its scales, starts where a kernel's copies can start.

    Args:
        data_key: of the codes ``[R, K]``, one byte each: rows are contiguous and begin at multiples of 16 bytes.
        scale_inv_key: of its scales. MN-major scales of a block along K are contiguous and begin at multiples of 16
            bytes; K-major ones have contiguous rows; one scale for each row is contiguous.
    """
    if not data_key.has_contiguous_rows or data_key.stride <= 0 or data_key.stride % ALIGNMENT or data_key.misalignment:
        return False
    strides = scale_inv_key.strides
    if layout.scale_major == "mn":
        bytes_per_line = strides[1] * layout.scale_dtype.itemsize
        return strides[0] == 1 and bytes_per_line % ALIGNMENT == 0 and not scale_inv_key.misalignment
    if layout.scales_along_k:
        return strides[1] == 1
    return layout.has_one_scale or strides[0] == 1 or data_key.rows == 1


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
    of_data, of_scale_inv = operand_allocations(layout, dtype, rows, columns)
    return of_data.empty(device), of_scale_inv.empty(device)


def aligned_copy(layout: Layout, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Copy an operand to where :func:`operand_allocations` puts it."""
    copies = empty_operand(data.device, layout, data.dtype, *data.shape)
    copy_bits(data, copies[0])
    copy_bits(scale_inv, copies[1])
    return copies


def is_aligned_result(out_key: TensorKey) -> bool:
    """Whether TMA can store the result of a GEMM: its rows begin at multiples of 16 bytes."""
    return out_key.is_vectorizable(1, ALIGNMENT)


def has_aligned_pairs(out_key: TensorKey, *of_columns: TensorKey | None) -> bool:
    """Whether a GEMM may write two neighbouring elements of its result at once, and read two of ``of_columns``.

    Args:
        of_columns: what has an element for each column of the result, a bias or B's scales, if there is one.
    """
    return out_key.is_vectorizable(2) and all(each is None or each.misalignment % 8 == 0 for each in of_columns)
