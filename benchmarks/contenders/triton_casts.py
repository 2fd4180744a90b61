"""Straightforward Triton casts: one pass, with no tuning beyond the block size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_fp8.numerics.formats import Float8

ELEMENTS = 4096
ROWS = 32
BLOCK = 128


@triton.jit
def _cast(x, scale, out, count, largest: tl.constexpr, elements: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * elements + tl.arange(0, elements)
    inside = at < count
    values = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(scale)
    values = tl.minimum(tl.maximum(values, -largest), largest)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _cast_blocks(  # type: ignore[no-untyped-def]
    x, out, scale_inv, rows, columns, largest: tl.constexpr, some_rows: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(1) * some_rows + tl.arange(0, some_rows)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-30)
    exponent = (largest / amax).to(tl.int32, bitcast=True) & 0x7F800000
    scale = exponent.to(tl.float32, bitcast=True)
    values = tl.minimum(tl.maximum(values * scale[:, None], -largest), largest)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)
    tl.store(scale_inv + tl.program_id(0) * rows + row, 1.0 / scale, mask=row < rows)


def cast(x: Tensor, scale: Tensor, float8: Float8) -> Tensor:
    """``x`` times ``scale []``, saturated and rounded."""
    out = torch.empty_like(x, dtype=float8.dtype)
    grid = (triton.cdiv(x.numel(), ELEMENTS),)
    _cast[grid](x, scale, out, x.numel(), float8.max, ELEMENTS, num_warps=8)
    return out


def cast_blocks(x: Tensor, float8: Float8) -> tuple[Tensor, Tensor]:
    """Blocks of 1 × 128 of ``x [R, K]``, each scaled by a power of two: codes and ``scale_inv [R, ceil(K / 128)]``."""
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=float8.dtype)
    scale_inv = torch.empty(triton.cdiv(columns, BLOCK), rows, device=x.device)
    grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, ROWS))
    _cast_blocks[grid](x, out, scale_inv, rows, columns, float8.max, ROWS, BLOCK, num_warps=8)
    return out, scale_inv.t()
