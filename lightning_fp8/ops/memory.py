"""The memory of an op's tensors: their keys in plan caches, fast allocation, and the alignment of GEMM operands.

The alignment that an FP8 GEMM asks of its operands and its result, and what happens where it is missing:

- Operands: :func:`is_aligned_operand`, which our kernels and cuBLASLt ask. Casts write no others
  (:func:`operand_allocations`); where an operand comes from elsewhere, the GEMM multiplies its :func:`aligned_copy`,
  unless nothing but the reference multiplies its layouts, which takes any.
  Sizes may be any: a row's bytes in memory are rounded up to 16, its shape stays ``K``.
- Sizes: :mod:`lightning_fp8.ops.torch_scaled_mm`, which pads operands for cuBLASLt; our kernels take any.
- The result: :func:`is_aligned_result` and :func:`has_aligned_pairs`. Otherwise our kernels store it in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.scaled import Layout

ALIGNMENT = 16
"""Bytes at multiples of which rows of codes begin: TMA and vector loads require it."""

PlainKey = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
OperandKey = tuple[torch.dtype, Sequence[int], tuple[int, ...], int, tuple[int, ...], int]
KeyAndDevice = tuple[torch.dtype, torch.Size, tuple[int, ...], int, torch.device]


def tensor_key(x: Tensor) -> PlainKey:
    """The key of a tensor in a plan cache: a plain tuple, for speed; planners make a :class:`TensorKey` of it."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT


def operand_key(data: Tensor, scale_inv: Tensor) -> OperandKey:
    """The key of a GEMM operand: ``tensor_key`` of ``data``, strides and misalignment of ``scale_inv``."""
    return (
        data.dtype, data.shape, data.stride(), data.data_ptr() % ALIGNMENT,
        scale_inv.stride(), scale_inv.data_ptr() % ALIGNMENT,
    )  # fmt: skip


def key_and_device(x: Tensor) -> KeyAndDevice:
    """The key of a tensor that may be on another device than the one planned for."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.device


def memoryless_key(x: Tensor) -> KeyAndDevice:
    """The key of a tensor whose strides and alignment do not matter to a plan."""
    return x.dtype, x.shape, (), 0, x.device


class TensorKey(NamedTuple):
    """The key of a tensor of one or two dimensions: all tensors of one key are served by one plan.

    Attributes:
        dtype, shape, device: the tensor's.
        strides: in elements.
        misalignment: bytes by which the first element lies behind a multiple of 16.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    misalignment: int
    device: torch.device

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def stride(self) -> int:
        """Elements from row to row; 0 of a vector."""
        return self.strides[0] if len(self.shape) == 2 else 0

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether a row's elements are side by side."""
        return self.strides[-1] == 1 or self.columns == 1

    def is_vectorizable(self, elements: int, alignment: int | None = None) -> bool:
        """Whether every row consists of whole vectors of ``elements``, each at a multiple of ``alignment`` bytes.

        ``alignment`` is the vector's own size unless given.
        """
        item = self.dtype.itemsize
        alignment = alignment or elements * item
        starts_aligned = self.stride * item % alignment == 0 and self.misalignment % alignment == 0
        return starts_aligned and self.columns % elements == 0


ABSENT = (0,)
"""Shape of the tensor that stands for a result that was not asked for."""


class Allocation(NamedTuple):
    """The memory of a tensor that an op allocates.

    Attributes:
        shape, strides: in elements, padding included.
        columns: how many of them the tensor shows; None for all.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None

    @classmethod
    def absent(cls, dtype: torch.dtype) -> Allocation:
        """The memory of a result that was not asked for."""
        return cls(ABSENT, (1,), dtype)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """The memory of a tensor of at most two dimensions without padding."""
        strides = (max(shape[1], 1), 1) if len(shape) == 2 else (1,) * len(shape)
        return cls(shape, strides, dtype)

    def t(self) -> Allocation:
        """The memory of the transposed view."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def empty(self, device: torch.device) -> Tensor:
        """Allocate it there, uninitialized, by way of the dispatcher."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return tensor if self.columns is None else tensor[:, : self.columns]


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""``(shape, strides, dtype) -> tensor``, uninitialized."""


def allocator(device: torch.device) -> Allocator:
    """A function that allocates on devices of ``device``'s type; of several GPUs, on the current one.

    Under ``torch.use_deterministic_algorithms`` new memory is filled as by torch's own functions.
    """
    if not torch.are_deterministic_algorithms_enabled():
        with suppress(ImportError, AttributeError):  # as Inductor does, past the dispatcher
            from torch._C._dynamo import guards

            return getattr(guards, f"_empty_strided_{device.type}")
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device.type)


def maker(device: torch.device, allocation: Allocation) -> Callable[[], Tensor]:
    """A function that allocates one tensor at each call; a tensor that was not asked for is always the same."""
    shape, strides, dtype, columns = allocation
    if shape == ABSENT:
        return repeat(empty_tensor(device, dtype)).__next__  # as a lambda would, without a frame of Python
    new = partial(allocator(device), shape, strides, dtype)
    return new if columns is None else lambda: new()[:, :columns]


@lru_cache(None)
@torch.inference_mode(False)  # the tensor is given to training too
def empty_tensor(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor ``[0]`` that stands for a result that was not asked for."""
    return torch.empty(0, dtype=dtype, device=device)


def copy_bits(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of one shape; FP8 and E8M0 as bytes, which every device can copy."""
    dtype = torch.uint8 if source.element_size() == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))


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


def code_allocation(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Allocation:
    """The memory of codes ``[rows, columns]`` that an op gives without scales: an operand's on a GPU, else contiguous.

    ``device``: of the codes.
    """
    if device.type == "cuda":
        return operand_allocations(Layout.TENSOR, dtype, rows, columns)[0]
    return Allocation.contiguous((rows, columns), dtype)


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
