"""Sequences one after the other (``thd``), and the same side by side, each padded to the longest."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` to a padded ``[B, H, L, D]`` and the lengths ``[B]``; padding is 0.

    Args:
        cu_seqlens: integers ``[B + 1]``, where each sequence starts; 0 comes first, T last. Sequences may be empty.

    Raises:
        ValueError: ``cu_seqlens`` does not rise from 0 to T.
    """
    lengths = _lengths(cu_seqlens, len(x))
    longest = max(lengths.tolist(), default=0)
    out = x.new_zeros(len(lengths), longest, *x.shape[1:])
    out[_places(lengths, longest)] = x
    return out.transpose(1, 2).contiguous(), lengths


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The way back from :func:`unpack`: ``[B, H, L, D]`` to ``[T, H, D]``, or ``[B, H, L]`` to ``[T, H]``."""
    lengths = _lengths(cu_seqlens, int(cu_seqlens[-1]))
    return x.transpose(1, 2)[_places(lengths, x.shape[2])]


def _lengths(cu_seqlens: Tensor, rows: int) -> Tensor:
    starts = cu_seqlens.cpu().long()
    lengths = starts[1:] - starts[:-1]
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != rows or (lengths < 0).any():
        raise ValueError(f"cu_seqlens={starts.tolist()} does not rise from 0 to the {rows} rows of the tensor")
    return lengths


def _places(lengths: Tensor, longest: int) -> Tensor:
    """True where a padded batch ``[B, L]`` holds a row."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
