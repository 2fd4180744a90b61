"""Packed sequences in compiled code, where shapes may depend on the number of rows, but not on sequence lengths."""

from __future__ import annotations

import torch
from torch import Tensor


def heads_of(x: Tensor, cu_seqlens: Tensor, longest: int | None) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` to a padded ``[B, H, L, D]`` and the lengths ``[B]``; padding is 0.

    Args:
        cu_seqlens: integers ``[B + 1]``, the start of each sequence. The compiled code fails with an assertion if it
            does not rise from 0 to at most T, or if a sequence has more than L rows.
        longest: L, at most T; None is T.
    """
    starts = cu_seqlens.to(x.device)
    rows = x.shape[0]
    longest = rows if longest is None else min(max(longest, 1), rows)
    lengths = starts[1:] - starts[:-1]
    rises = (starts[0] == 0) & (starts[-1] <= rows) & (lengths >= 0).all()
    wrong = "cu_seqlens must be the sequences' lengths added up, 0 first, and end at or before the tensor's last row"
    torch._assert_async(rises, wrong)  # type: ignore[call-overload]
    too_long = "a sequence has more rows than max_seqlen_q or max_seqlen_kv says; pass its length, or None"
    torch._assert_async((lengths <= longest).all(), too_long)  # type: ignore[call-overload]
    index = torch.arange(longest, device=x.device)
    places = (starts[:-1, None] + index).clamp(max=rows - 1)
    out = x[places].masked_fill((index >= lengths[:, None])[..., None, None], 0)
    return out.transpose(1, 2), lengths


def rows_of(o: Tensor, cu_seqlens: Tensor, rows: int) -> Tensor:
    """The sequences ``o [B, H, L, D]`` packed to ``[rows, H, D]``; rows after the last sequence are 0."""
    if len(cu_seqlens) == 1 or not rows:
        return o.new_zeros(rows, o.shape[1], o.shape[3])
    starts = cu_seqlens.to(o.device)
    row = torch.arange(rows, device=o.device)
    sequence = sequence_of(row, starts)
    places = (row - starts[sequence]).clamp(max=o.shape[2] - 1)
    return o.transpose(1, 2)[sequence, places].masked_fill((row >= starts[-1])[:, None, None], 0)


def rows_between_gaps(cu_seqlens: Tensor, padded: Tensor, rows: int) -> Tensor:
    """The index, in sequences with gaps, of each of ``rows`` rows of sequences without gaps: integers ``[T]``.

    Args:
        cu_seqlens: integers ``[B + 1]``, the cumulative lengths; rows after the last sequence repeat its last one.
        padded: the index of the first row of each sequence, with gaps.
    """
    row = torch.arange(rows, device=cu_seqlens.device).minimum((cu_seqlens[-1] - 1).clamp(min=0))
    if len(cu_seqlens) == 1:
        return row
    fits = (cu_seqlens.diff() <= padded.diff()).all() & (padded[0] >= 0) & (padded[-1] <= rows)
    torch._assert_async(fits, "cu_seqlens and cu_seqlens_padded do not fit together or exceed the rows")
    return (row + (padded - cu_seqlens)[sequence_of(row, cu_seqlens)]).clamp(max=rows - 1)


def sequence_of(row: Tensor, starts: Tensor) -> Tensor:
    """Which sequence holds each row; the last one where none does."""
    return torch.bucketize(row, starts[1:].contiguous(), right=True).clamp(max=len(starts) - 2)
