"""transformers' masks as bands around the diagonal, and a tensor that encodes a band with padding.

transformers describes a mask by a function of a query's and a key's index, for example ``kv_idx <= q_idx``. Called with
symbols instead of numbers, it yields the inequalities it checks, both in eager mode and under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops import Band


class _Limits:
    """How many keys before and after its own position a query attends to; None is unlimited."""

    device = None

    def __init__(self, left: int | None = None, right: int | None = None) -> None:
        self.left, self.right = left, right

    def __and__(self, other: Any) -> _Limits:
        if not isinstance(other, _Limits):
            raise TypeError("no band")
        return _Limits(_least(self.left, other.left), _least(self.right, other.right))

    def __bool__(self) -> bool:
        raise TypeError("no band")  # ``and`` and ``if`` would lose one side

    def to(self, device: Any) -> _Limits:
        return self


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)  # as torch.compile can trace it


class _Difference:
    """``query * (query index) + key * (key index) + offset``: an index, or a difference of two."""

    def __init__(self, query: int, key: int, offset: int = 0) -> None:
        self.query, self.key, self.offset = query, key, offset

    def __sub__(self, other: Any) -> _Difference:
        if not isinstance(other, _Difference):
            other = _Difference(0, 0, _whole(other))
        return _Difference(self.query - other.query, self.key - other.key, self.offset - other.offset)

    def __le__(self, other: Any) -> _Limits:
        difference = self - other
        if (difference.query, difference.key) == (-1, 1):  # key - query <= -offset
            return _Limits(right=-difference.offset)
        if (difference.query, difference.key) == (1, -1):
            return _Limits(left=-difference.offset)
        raise TypeError("no band")

    def __ge__(self, other: Any) -> _Limits:
        if isinstance(other, int) and other <= self.offset and min(self.query, self.key) >= 0:
            return _Limits()  # an index is never negative
        return _Difference(0, 0) - (self - other) <= 0

    def __lt__(self, other: Any) -> _Limits:
        return self - other <= -1

    def __gt__(self, other: Any) -> _Limits:
        return _Difference(0, 0) - (self - other) <= -1

    def __abs__(self) -> _Distance:
        return _Distance(self.offset)

    def new_ones(self, *args: Any, **options: Any) -> _Limits:
        """The initial value of an intersection of masks, in which every key is visible."""
        return _Limits()


class _Distance:
    """``|query - key + offset|``."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __le__(self, other: Any) -> _Limits:
        if self.offset:
            raise TypeError("no band")
        return _Limits(_whole(other), _whole(other))


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("no band")
    return value


def band_of(mask_function: Callable[..., Any]) -> Band | None:
    """The band described by ``mask_function(batch, head, query, key)``; None if it is not a band."""
    try:
        limits = mask_function(None, None, _Difference(1, 0), _Difference(0, 1))
    except Exception:  # a custom function may raise anything when called with symbols
        return None
    if not isinstance(limits, _Limits) or min(limits.left or 0, limits.right or 0) < 0:
        return None
    return Band(limits.left, limits.right)


class Padded(NamedTuple):
    """A band, and which keys of each sequence are not padding: ``key_mask``, bool ``[B, Lk]``."""

    key_mask: Tensor
    band: Band


def carried(padded: Padded) -> Tensor:
    """Encode ``padded`` as one tensor that a model passes on like a mask: a view ``[B, Lk, 1, left + 2, right + 2]``.

    An unlimited side has size 1. Sizes are preserved by activation checkpointing and torch.compile, and no other mask
    of a model has five dimensions.
    """
    sizes = [1 if limit is None else limit + 2 for limit in (padded.band.left, padded.band.right)]
    return padded.key_mask[:, :, None, None, None].expand(-1, -1, 1, *sizes)


def from_carried(mask: Tensor) -> Padded:
    """The inverse of :func:`carried`."""
    left, right = (None if size == 1 else size - 2 for size in mask.shape[3:])
    return Padded(mask[:, :, 0, 0, 0], Band(left, right))


def is_carried(mask: Tensor | None) -> bool:
    """Whether ``mask`` was made by :func:`carried`."""
    return mask is not None and mask.dim() == 5


def dense(padded: Padded, queries: int) -> Tensor:
    """The mask as bool ``[B, 1, queries, Lk]``; True where a query attends to a key."""
    key_mask, band = padded
    offset = (
        torch.arange(key_mask.shape[1], device=key_mask.device) - torch.arange(queries, device=key_mask.device)[:, None]
    )
    seen = key_mask[:, None, None, :]
    if band.left is not None:
        seen = seen & (offset >= -band.left)
    if band.right is not None:
        seen = seen & (offset <= band.right)
    return seen.expand(-1, 1, queries, -1)


def ends_padded(key_mask: Tensor) -> Tensor:
    """Whether padding is only at the end of sequences: a 0-dimensional bool tensor."""
    return ~(key_mask[:, 1:] & ~key_mask[:, :-1]).any()
