"""How attention's operands become FP8: E4M3, scaled in blocks of one head and 128 rows.

Why so: E4M3 everywhere, gradients too, since a current scale gives the range and three bits of mantissa halve the error
of two. Blocks of whole rows, since a block's scale is then one factor of a tile's product along rows and along columns:
the transposed copy holds the same codes. ``448 / amax``, not rounded to a power of two: where one element dominates a
block, it is represented exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8 import scaling
from lightning_fp8.attention.ops.masks import Band
from lightning_fp8.formats import E4M3
from lightning_fp8.ops.cast import absolute_max, decode, saturating_cast

BLOCK = 128
"""Rows that share a scale; the first block starts at a sequence's first row."""


class Codes(NamedTuple):
    """``data * scale_inv`` of the row's block is the value.

    Attributes:
        data: E4M3 ``[B, H, L, D]``.
        scale_inv: float32 ``[B, H, ceil(L / 128)]``.
    """

    data: Tensor
    scale_inv: Tensor

    def by_row(self) -> Tensor:
        """Each row's ``scale_inv``: float32 ``[B, H, L]``."""
        return self.scale_inv.repeat_interleave(BLOCK, 2)[:, :, : self.data.shape[2]]

    def decode(self) -> Tensor:
        """The codes as float32 numbers ``[B, H, L, D]``, without the scale."""
        return decode(self.data).float()

    def dequantize(self) -> Tensor:
        """float32 ``[B, H, L, D]``."""
        return self.decode() * self.by_row()[..., None]


def rows_of_mean(band: Band) -> int | None:
    """How many of a sequence's first keys make the mean that :func:`cast` subtracts from all; None is all of them.

    Where a mask hides later keys, those of the first block: a key then moves no digit of rows that never see it, but
    for those of its own block, whose scale it shares.
    """
    return None if band.right is None else BLOCK


@torch.no_grad()
def cast(x: Tensor, centered: bool = False, lengths: Tensor | None = None, mean_rows: int | None = None) -> Codes:
    """Quantize a tensor of heads: queries, keys, values or the output's gradient.

    ``centered`` subtracts each channel's mean over the sequence first. Attention over keys does not change by it: all
    scores of a query move alike, which softmax ignores, and its gradient of scores sums to 0 (Zhang et al.,
    "SageAttention", arXiv:2410.02367, section 4.2). What is saved is the digits that a common offset would take. So
    with any other vector, such as the mean of the first rows.

    A value that is not finite becomes NaN, which E4M3 has (it has no inf, and a saturated one would hide an overflow);
    scales and means are those of the finite values beside it.

    Args:
        x: ``[B, H, L, D]`` of any floating dtype.
        lengths: integers ``[B]``; rows from there on are padding: codes 0, and no part of a scale or a mean.
        mean_rows: how many first rows make the mean, see :func:`rows_of_mean`; None is all.
    """
    values = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if lengths is not None:
        padding = torch.arange(x.shape[2], device=x.device) >= lengths.to(x.device)[:, None]
        values.masked_fill_(padding[:, None, :, None], 0)
    finite = torch.isfinite(values)
    if not finite.all():
        values.masked_fill_(~finite, torch.nan)
    if centered:
        leading = values[:, :, :mean_rows].nan_to_num(0)
        mean = leading.sum(2, keepdim=True) / _rows(leading, lengths)
        values -= torch.where(torch.isfinite(mean), mean, 0.0)
        if lengths is not None:
            values.masked_fill_(padding[:, None, :, None], 0)
    batch, heads, length, channels = x.shape
    blocks = values.nan_to_num(0)
    if length % BLOCK:
        blocks = torch.cat([blocks, blocks.new_zeros(batch, heads, -length % BLOCK, channels)], 2)
    amax = absolute_max(blocks.view(batch, heads, -(-length // BLOCK), BLOCK * channels), 3)
    scale = scaling.current_scale(amax, E4M3.max)
    by_row = scale.repeat_interleave(BLOCK, 2)[:, :, :length, None]
    return Codes(saturating_cast(values, by_row, E4M3), 1.0 / scale)


def _rows(x: Tensor, lengths: Tensor | None) -> Tensor | int:
    """What a mean over the rows of ``x`` divides by; not 0."""
    most = max(x.shape[2], 1)
    return most if lengths is None else lengths.to(x.device).clamp(1, most)[:, None, None, None]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of each row's own scale, ``448 / amax``, as float32 numbers, and ``scale_inv``. Overwrites ``x``.

    Args:
        x: float32 ``[..., N]``.

    Returns:
        ``[..., N]`` and ``[..., 1]``. A row with a value that is not finite gets NaN for its ``scale_inv``: the cast
        alone would saturate an inf.
    """
    amax = x.abs().amax(-1, keepdim=True)
    return _round(x, scaling.current_scale(amax, E4M3.max), amax)


def round_rows_running(x: Tensor, fitted: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`round_rows`, with a scale that stays from tile to tile and halves only when a row's values outgrow it.

    A row starts with ``448 / amax`` of the first tile in which it is not 0. A kernel that accumulates in the scale's
    units rescales, by a power of two and so exactly, when the scale changes.

    Args:
        x: float32 ``[..., N]``; overwritten.
        fitted: float32 ``[..., 1]``, what 448 stands for so far, at first 0; updated.
    """
    amax = x.abs().amax(-1, keepdim=True)
    ratio = amax / fitted
    power = scaling.floor_power_of_2(ratio)
    grown = fitted * torch.where(power < ratio, 2 * power, power)
    # anew where there is nothing to double, or too little: 0, NaN, a ratio beyond float32
    grown = torch.where(torch.isfinite(grown), grown, amax)
    fitted.copy_(torch.where(amax <= fitted, fitted, grown))
    return _round(x, scaling.current_scale(fitted, E4M3.max), fitted)


def _round(x: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    codes = decode(saturating_cast(x, scale, E4M3)).float()
    return codes, torch.where(torch.isfinite(amax), 1.0 / scale, torch.nan)
