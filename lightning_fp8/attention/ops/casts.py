"""Casts of attention's operands to E4M3, with a scale per block of one head and 128 rows.

Reasons: E4M3 for all operands, including gradients, because the current scale covers the range, and three mantissa bits
halve the error of two. Blocks of whole rows, because a block's scale then is one factor of a tile's product along rows
and along columns, so that the transposed copy has the same codes. ``448 / amax`` without rounding to a power of two,
because an element that dominates its block is then represented exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops.masks import Band
from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.cast import absolute_max, decode, saturating_cast

BLOCK = 128
"""Rows that share a scale; the first block starts at a sequence's first row."""


class Codes(NamedTuple):
    """FP8 codes; a value is ``data * scale_inv``, with the ``scale_inv`` of the row's block.

    Attributes:
        data: E4M3 ``[B, H, L, D]``.
        scale_inv: float32 ``[B, H, ceil(L / 128)]``.
    """

    data: Tensor
    scale_inv: Tensor

    def by_row(self) -> Tensor:
        """``scale_inv`` of each row: float32 ``[B, H, L]``."""
        return self.scale_inv.repeat_interleave(BLOCK, 2)[:, :, : self.data.shape[2]]

    def decode(self) -> Tensor:
        """The codes as float32 ``[B, H, L, D]``, without the scale."""
        return decode(self.data).float()

    def dequantize(self) -> Tensor:
        """The values: float32 ``[B, H, L, D]``."""
        return self.decode() * self.by_row()[..., None]


def rows_of_mean(band: Band) -> int | None:
    """How many of a sequence's first keys :func:`cast` averages for the mean it subtracts; None is all.

    If a mask hides later keys, only the first block is averaged. A key then does not affect rows that do not attend to
    it, except those of its own block, which share its scale.
    """
    return None if band.right is None else BLOCK


@torch.no_grad()
def cast(x: Tensor, centered: bool = False, lengths: Tensor | None = None, mean_rows: int | None = None) -> Codes:
    """Quantize a tensor of heads: queries, keys, values or the output's gradient.

    ``centered`` first subtracts each channel's mean over the sequence. This does not change attention over keys: all
    scores of a query shift equally, which softmax ignores, and the gradient of its scores sums to 0 (Zhang et al.,
    "SageAttention", arXiv:2410.02367, section 4.2). It avoids spending precision on a common offset. The same holds
    for any other vector, such as the mean of the first rows.

    Non-finite values become NaN: E4M3 has no inf, and saturation would hide an overflow. They are ignored in scales and
    means.

    Args:
        x: ``[B, H, L, D]`` of any floating dtype.
        centered: subtract the mean of the first ``mean_rows`` rows.
        lengths: integers ``[B]``; later rows are padding: their codes are 0, and scales and means ignore them.
        mean_rows: how many rows are averaged, see :func:`rows_of_mean`; None is all.
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
    """Divisor of a mean over the rows of ``x``; at least 1."""
    most = max(x.shape[2], 1)
    return most if lengths is None else lengths.to(x.device).clamp(1, most)[:, None, None, None]


START = 2.0**-119
"""Lower bound of a row's amax: 448 divided by it is finite in float32."""

HEADROOM = 8.0
"""How many times the largest value of its first tile a running scale starts with, so that later tiles rarely exceed it.
A power of two, so that this value is represented exactly."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to E4M3 with its own scale, ``448 / amax``. Overwrites ``x``.

    Args:
        x: float32 ``[..., N]``.

    Returns:
        The scaled E4M3 values, as float32 ``[..., N]``, and ``scale_inv [..., 1]``. ``scale_inv`` is NaN for a row with
        a non-finite value; otherwise an inf would go unnoticed, because the cast saturates it.
    """
    amax = x.abs().amax(-1, keepdim=True).clamp(min=START)
    return _round(x, scaling.current_scale(amax, E4M3.max), amax)


def round_rows_running(x: Tensor, fitted: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`round_rows` with a scale that is kept from tile to tile, and halved only when values exceed its range.

    A row starts with ``448 / (HEADROOM * amax)`` of the first tile in which it exceeds :data:`START`. A kernel that
    accumulates in units of the scale rescales when it changes, exactly, since by a power of two, except when a row
    starts.

    Args:
        x: float32 ``[..., N]``; overwritten.
        fitted: float32 ``[..., 1]``, the value that code 448 represents so far, initially :data:`START`; updated.
    """
    amax = x.abs().amax(-1, keepdim=True)
    ratio = amax / fitted
    power = scaling.floor_power_of_2(ratio)
    grown = fitted * torch.where(power < ratio, 2 * power, power)
    # Start anew if it was not set, or cannot be doubled: a value is NaN, or the ratio overflows float32.
    grown = torch.where(torch.isfinite(grown) & (fitted > START), grown, HEADROOM * amax)
    fitted.copy_(torch.where(amax <= fitted, fitted, grown))
    return _round(x, scaling.current_scale(fitted, E4M3.max), fitted)


def _round(x: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    codes = decode(saturating_cast(x, scale, E4M3)).float()
    return codes, torch.where(torch.isfinite(amax), 1.0 / scale, torch.nan)
