"""Sequences one after the other (``thd``), and the same side by side, each padded to the longest."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` to a padded ``[B, H, L, D]`` and the lengths ``[B]``; padding is 0.

    Args:
        cu_seqlens: integers ``[B + 1]``, where each sequence starts; 0 comes first, the end of the last one last. Rows
            behind it are padding, which is left out. Sequences may be empty.

    Raises:
        ValueError: ``cu_seqlens`` does not rise from 0 to at most T.
    """
    lengths = _lengths(cu_seqlens, len(x))
    longest = max(lengths.tolist(), default=0)
    out = x.new_zeros(len(lengths), longest, *x.shape[1:])
    out[_places(lengths, longest)] = x[: int(lengths.sum())]
    return out.transpose(1, 2).contiguous(), lengths


def pack(x: Tensor, cu_seqlens: Tensor, rows: int | None = None) -> Tensor:
    """The way back from :func:`unpack`: ``[B, H, L, D]`` to ``[T, H, D]``, or ``[B, H, L]`` to ``[T, H]``.

    ``rows`` is T, where 0 stands behind the last sequence; None is its end.
    """
    packed_rows = int(cu_seqlens[-1])
    rows = packed_rows if rows is None else rows
    lengths = _lengths(cu_seqlens, rows)
    packed = x.transpose(1, 2)[_places(lengths, x.shape[2])]
    if rows == packed_rows:
        return packed
    return torch.cat([packed, packed.new_zeros(rows - packed_rows, *packed.shape[1:])])


def _lengths(cu_seqlens: Tensor, rows: int) -> Tensor:
    starts = cu_seqlens.cpu().long()
    lengths = starts[1:] - starts[:-1]
    if len(starts) == 0 or starts[0] != 0 or starts[-1] > rows or (lengths < 0).any():
        raise ValueError(f"cu_seqlens={starts.tolist()} does not rise from 0 to at most the tensor's {rows} rows")
    return lengths


def _places(lengths: Tensor, longest: int) -> Tensor:
    """True where a padded batch ``[B, L]`` holds a row."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
