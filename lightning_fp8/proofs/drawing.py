"""Input tensors for proofs: deterministic, over a wide range, with zeros of both signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.memory import ALIGNMENT, PlainKey

MOST_ROWS = 1021
"""Rows that are drawn. Those of larger tensors repeat them, which is faster; no size of a tile divides this prime."""


def sample(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``[rows, columns]`` over many binades, with zeros of both signs and some tiny numbers."""
    if rows > MOST_ROWS:
        return with_peaks(repeated(sample(MOST_ROWS, columns, dtype, seed), rows, 0))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-12, 8, (rows, columns), generator=generator).float())
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    x[torch.rand(rows, columns, generator=generator) < 0.05] = -0.0
    return with_peaks(x.to(dtype))


def values(rows: int, columns: int, dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> Tensor:
    """``[rows, columns]`` whose magnitude varies by row, as activations' does, with zeros of both signs."""
    if rows > MOST_ROWS:
        return repeated(values(MOST_ROWS, columns, dtype, seed, spread), rows, 0)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= spread * torch.exp2(torch.randn(rows, 1, generator=generator))
    x[torch.rand(rows, columns, generator=generator) < 0.02] = 0.0
    x[torch.rand(rows, columns, generator=generator) < 0.02] = -0.0
    return x.to(dtype)


def every_code(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random codes, NaN included, in ``[rows, columns]``."""
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randint(256, (rows, columns), dtype=torch.uint8, generator=generator).view(dtype)


def numbers(rows: int, columns: int, seed: int, exact: bool) -> Tensor:
    """Integers up to 3, whose sums of products are exact, or normal numbers with a magnitude per 128 of a row."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + seed)
    if exact:
        return torch.randint(-3, 4, (rows, columns), generator=generator).float()
    x = torch.randn(rows, columns, generator=generator)
    sizes = torch.exp2(torch.randn(rows, -(-columns // 128), generator=generator))
    return x * sizes.repeat_interleave(128, 1)[:, :columns]


def like(key: PlainKey, x: Tensor, gap: int = 0) -> Tensor:
    """``x [rows, columns]`` or ``[columns]``, copied to memory with the alignment of a tensor of this key.

    The first element and the rows have the key's offsets from multiples of 16 bytes. ``x`` has the key's dtype; its
    shape may differ.

    Args:
        gap: additional elements between rows, a multiple of 16.
    """
    dtype, _, strides, misalignment = key
    item = dtype.itemsize
    if x.dim() == 1:
        return _laid_out(x, (1,), misalignment // item, "cpu")
    columns = x.shape[1]
    stride = columns + gap + (strides[0] - columns) % ALIGNMENT if x.shape[0] > 1 else columns
    return _laid_out(x, (stride, 1), misalignment // item, "cpu")


def apart(x: Tensor, gap: int) -> Tensor:
    """``x [rows, columns]`` with ``gap`` additional elements between rows."""
    rows = x.new_zeros(x.shape[0], x.stride(0) + gap)[:, : x.shape[1]]
    return rows.copy_(x)


def sizes_of_blocks(rows: int, columns: int, seed: int, block: tuple[int | None, int | None]) -> Tensor:
    """Powers of two from 1 to 8 ``[rows, columns]``, one per block of scales, or one for the whole tensor."""
    generator = torch.Generator().manual_seed(rows + columns + seed)
    num = (1 if side is None else -(-length // side) for length, side in zip((rows, columns), block))
    sizes = torch.exp2(torch.randint(0, 4, tuple(num), generator=generator).float())
    for dim, (length, side) in enumerate(zip((rows, columns), block)):
        sizes = sizes.repeat_interleave(side or length, dim).narrow(dim, 0, length)
    return sizes


def repeated(x: Tensor, size: int, dim: int) -> Tensor:
    """``x`` with ``size`` elements along ``dim``, which repeat its own."""
    return x if x.shape[dim] == size else x.index_select(dim, torch.arange(size) % x.shape[dim])


def with_peaks(x: Tensor, row: int = -1) -> Tensor:
    """``x``, changed in place, with the largest magnitude of each column in one row, by default the last one.

    A kernel that omits that row finds another maximum, as does one that omits a sign: signs alternate by column, and
    the largest of all is negative in the last row and positive in another one. A single row is left as it is.
    """
    if len(x) > 1:
        peaks = 2 * x.abs().amax(0)
        peaks[::2].neg_()
        largest = peaks[peaks.abs().argmax()]
        x[row] = peaks if bool(largest < 0) == (row == -1) else -peaks
    return x


def moved(x: Any, device: str) -> Any:
    """Copy a tensor to ``device`` with its strides and alignment; other values are returned unchanged."""
    if not isinstance(x, Tensor) or device == "cpu":
        return x
    return _laid_out(x, x.stride(), x.data_ptr() % ALIGNMENT // x.element_size(), device)


def _laid_out(x: Tensor, strides: tuple[int, ...], offset: int, device: str) -> Tensor:
    """A copy of ``x`` with these strides, at an offset of ``offset`` elements in new memory."""
    size = offset + 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides)) if x.numel() else 0
    memory = torch.empty(size, dtype=x.dtype, device=device)
    return memory.as_strided(x.shape, strides, min(offset, size)).copy_(x)
