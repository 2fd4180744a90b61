"""The memory of an op's tensors: their keys in plan caches, fast allocation, and the alignment of GEMM operands.

FP8 GEMMs have these requirements on alignment:

- Operands must be aligned (:func:`is_aligned_operand`) for kernels and cuBLASLt. Casts always write aligned operands
  (:func:`operand_allocations`): rows are padded to multiples of 16 bytes in memory, and the shape stays ``K``. For
  other operands the GEMM multiplies an :func:`aligned_copy`. The reference does not require alignment.
- Sizes must be multiples of 16 for cuBLASLt; :mod:`lightning_fp8.ops.torch_scaled_mm` pads operands. Kernels support
  all sizes.
- If the result is not aligned (:func:`is_aligned_result` and :func:`has_aligned_pairs`), kernels store it in smaller
  pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.numerics.scaled import Layout

ALIGNMENT = 16
"""The alignment of rows of codes in bytes, which TMA and vector loads require."""

PlainKey = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
OperandKey = tuple[torch.dtype, Sequence[int], tuple[int, ...], int, tuple[int, ...], int]


def tensor_key(x: Tensor) -> PlainKey:
    """The key of a tensor in a plan cache, a plain tuple for speed. Planners convert it to a :class:`TensorKey`."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT


def operand_key(data: Tensor, scale_inv: Tensor) -> OperandKey:
    """The key of a GEMM operand: the ``tensor_key`` of ``data``, and the strides and misalignment of ``scale_inv``."""
    return (
        data.dtype, data.shape, data.stride(), data.data_ptr() % ALIGNMENT,
        scale_inv.stride(), scale_inv.data_ptr() % ALIGNMENT,
    )  # fmt: skip


class TensorKey(NamedTuple):
    """The key of a tensor of one or two dimensions. All tensors with equal keys have the same plan.

    Attributes:
        dtype, shape, device: the attributes of the tensor.
        strides: the strides in elements.
        misalignment: the address of the first element modulo 16.
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
        """The row stride in elements; 0 for a vector."""
        return self.strides[0] if len(self.shape) == 2 else 0

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether the elements of each row are contiguous."""
        return self.strides[-1] == 1 or self.columns == 1

    def is_vectorizable(self, elements: int, alignment: int | None = None) -> bool:
        """Whether every row consists of whole vectors of ``elements`` that are aligned to ``alignment`` bytes.

        The default ``alignment`` is the size of a vector.
        """
        item = self.dtype.itemsize
        alignment = alignment or elements * item
        starts_aligned = self.stride * item % alignment == 0 and self.misalignment % alignment == 0
        return starts_aligned and self.columns % elements == 0


ABSENT = (0,)
"""The shape of a result that is not requested."""


class Allocation(NamedTuple):
    """The memory of a tensor that an op allocates.

    Attributes:
        shape, strides: the shape, including padding, and the strides in elements.
        columns: the number of columns without padding; None if the tensor is not padded.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    columns: int | None = None

    @classmethod
    def absent(cls, dtype: torch.dtype) -> Allocation:
        """The memory of a result that is not requested."""
        return cls(ABSENT, (1,), dtype)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """The memory of a tensor of at most two dimensions without padding."""
        strides = (max(shape[1], 1), 1) if len(shape) == 2 else (1,) * len(shape)
        return cls(shape, strides, dtype)

    def t(self) -> Allocation:
        """The memory of the transposed view."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def stacked(self, number: int | None) -> Allocation:
        """The memory of ``number`` such matrices, one after the other; itself if it is no matrix, or for None."""
        if len(self.shape) < 2 or number is None:
            return self
        step = max(size * stride for size, stride in zip(self.shape, self.strides))
        return self._replace(shape=(number, *self.shape), strides=(step, *self.strides))

    def empty(self, device: torch.device) -> Tensor:
        """Allocate an uninitialized tensor on the device, through the dispatcher."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return tensor if self.columns is None else tensor[..., : self.columns]


Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""``(shape, strides, dtype) -> tensor``, uninitialized."""


def allocator(device: torch.device) -> Allocator:
    """A function that allocates on ``device``, or on the current GPU if ``device`` is a GPU.

    Under ``torch.use_deterministic_algorithms`` it fills new memory, as torch's own functions do.
    """
    if not torch.are_deterministic_algorithms_enabled():
        with suppress(ImportError, AttributeError):  # bypasses the dispatcher, as Inductor does
            from torch._C._dynamo import guards

            return getattr(guards, f"_empty_strided_{device.type}")
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device.type)


def maker(device: torch.device, allocation: Allocation) -> Callable[[], Tensor]:
    """A function that allocates a tensor. For a result that is not requested, it always returns the same tensor."""
    shape, strides, dtype, columns = allocation
    if shape == ABSENT:
        return repeat(empty_tensor(device, dtype)).__next__  # like a lambda, but without a Python frame
    new = partial(allocator(device), shape, strides, dtype)
    if columns is None:
        return new
    unpadded = (*shape[:-1], columns)
    return lambda: _reinterpret_tensor(new(), unpadded, strides, 0)


@lru_cache(None)
@torch.inference_mode(False)  # the tensor is also used in training
def empty_tensor(device: torch.device, dtype: torch.dtype, number: int = 0) -> Tensor:
    """The tensor ``[0]`` of a result that is not requested. Results of one op have different numbers or dtypes."""
    return torch.empty(0, dtype=dtype, device=device)


def copy_bits(source: Tensor, target: Tensor) -> None:
    """Copy between tensors of equal shape. FP8 and E8M0 are copied as bytes, which all devices support."""
    dtype = torch.uint8 if source.element_size() == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))


def is_aligned_operand(layout: Layout, data_key: TensorKey, scale_inv_key: TensorKey) -> bool:
    """Whether the rows of an operand's codes and the lines of its scales have the alignment that kernels need.

    Args:
        data_key: the key of the codes ``[R, K]``. Rows must be contiguous and aligned to 16 bytes.
        scale_inv_key: the key of the scales. Lines of MN-major scales must be contiguous and aligned to 16 bytes.
            K-major scales must have contiguous rows. One scale for each row must be contiguous.
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
    """The memory of ``data`` and ``scale_inv`` of a ``[rows, columns]`` GEMM operand that kernels write and read.

    Rows of ``data`` are padded to multiples of 16 bytes. Casts fill the padding with zeros. Lines of MN-major scales
    are aligned to 16 bytes.
    """
    stride = ceil_div(columns, ALIGNMENT) * ALIGNMENT
    data = Allocation((rows, stride), (stride, 1), dtype, None if stride == columns else columns)
    shape = layout.scale_shape(rows, columns)
    if layout.has_one_scale:
        return data, Allocation.contiguous(shape, layout.scale_dtype)
    per_line = ALIGNMENT // layout.scale_dtype.itemsize
    strides = (1, ceil_div(rows, per_line) * per_line) if layout.scale_major == "mn" else (shape[1], 1)
    return data, Allocation(shape, strides, layout.scale_dtype)


def code_allocation(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Allocation:
    """The memory of codes ``[rows, columns]`` that an op returns without scales.

    On a GPU, it is aligned like that of a GEMM operand. Otherwise it is contiguous.
    """
    if device.type == "cuda":
        return operand_allocations(Layout.TENSOR, dtype, rows, columns)[0]
    return Allocation.contiguous((rows, columns), dtype)


def aligned_copy(layout: Layout, data: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Copy an operand to memory as in :func:`operand_allocations`."""
    of_data, of_scale_inv = operand_allocations(layout, data.dtype, *data.shape)
    copies = of_data.empty(data.device), of_scale_inv.empty(data.device)
    copy_bits(data, copies[0])
    copy_bits(scale_inv, copies[1])
    return copies


def is_aligned_result(out_key: TensorKey) -> bool:
    """Whether TMA can store the result of a GEMM, whose rows must be aligned to 16 bytes."""
    return out_key.is_vectorizable(1, ALIGNMENT)


def has_aligned_pairs(out_key: TensorKey, *of_columns: TensorKey | None) -> bool:
    """Whether a GEMM may write two neighboring elements of its result at once, and read two of ``of_columns``.

    Args:
        of_columns: a tensor with one element for each column of the result (a bias, or B's scales), or None.
    """
    return out_key.is_vectorizable(2) and all(each is None or each.misalignment % 8 == 0 for each in of_columns)
