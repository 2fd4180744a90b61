"""transformers' masks as bands around the diagonal, and how a band and padding travel through a model as one tensor.

transformers describes a mask by a function of the indices of a query and a key, ``kv_idx <= q_idx`` for example. Called
with symbols instead of numbers it gives the inequalities that it checks, eagerly and while torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops import Band


class _Difference:
    """``query * (a query's index) + key * (a key's index) + offset``, an index or a difference of two."""

    def __init__(self, query: int, key: int, offset: int = 0) -> None:
        self.query, self.key, self.offset = query, key, offset

    def __sub__(self, other: Any) -> _Difference:
        if isinstance(other, _Difference):
            return _Difference(self.query - other.query, self.key - other.key, self.offset - other.offset)
        return _Difference(self.query, self.key, self.offset - _whole(other))

    def __le__(self, other: Any) -> _Limits:
        return (self - other).at_most_zero()

    def __ge__(self, other: Any) -> _Limits:
        if isinstance(other, int) and other <= self.offset and min(self.query, self.key) >= 0:
            return _Limits()  # an index is never negative
        return (_Difference(0, 0) - (self - other)).at_most_zero()

    def __lt__(self, other: Any) -> _Limits:
        return (self - other - (-1)).at_most_zero()

    def __gt__(self, other: Any) -> _Limits:
        return (_Difference(0, 0) - (self - other) - (-1)).at_most_zero()

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def new_ones(self, *args: Any, **options: Any) -> _Limits:
        """What an intersection of masks starts with: all is seen."""
        return _Limits()

    def at_most_zero(self) -> _Limits:
        """``key - query <= -offset``, or ``query - key <= -offset``."""
        if (self.query, self.key) == (-1, 1):
            return _Limits(right=-self.offset)
        if (self.query, self.key) == (1, -1):
            return _Limits(left=-self.offset)
        raise TypeError("no band")


class _Distance:
    """``|query - key|``."""

    def __init__(self, difference: _Difference) -> None:
        self.difference = difference

    def __le__(self, other: Any) -> _Limits:
        if self.difference.offset:
            raise TypeError("no band")
        return _Limits(_whole(other), _whole(other))


class _Limits:
    """How many keys before and after its own a query sees; None is all."""

    device = None

    def __init__(self, left: int | None = None, right: int | None = None) -> None:
        self.left, self.right = left, right

    def __and__(self, other: Any) -> _Limits:
        if not isinstance(other, _Limits):
            raise TypeError("no band")
        return _Limits(_smaller(self.left, other.left), _smaller(self.right, other.right))

    def __bool__(self) -> bool:
        raise TypeError("no band")  # what ``and`` or ``if`` makes of it would lose one side

    def to(self, device: Any) -> _Limits:
        return self


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("no band")
    return value


def band_of(mask_function: Callable[..., Any]) -> Band | None:
    """The band that ``mask_function(batch, head, query, key)`` says; None where it says something else."""
    try:
        limits = mask_function(None, None, _Difference(1, 0), _Difference(0, 1))
    except Exception:  # whatever somebody's function does with what is no number
        return None
    if not isinstance(limits, _Limits) or (limits.left or 0) < 0 or (limits.right or 0) < 0:
        return None
    return Band(limits.left, limits.right)


class Padded(NamedTuple):
    """A band, and of each sequence the keys that count: ``key_mask``, bool ``[B, Lk]``."""

    key_mask: Tensor
    band: Band


def carried(padded: Padded) -> Tensor:
    """``padded`` as one tensor that a model hands down like a mask: a view ``[B, Lk, 1, left + 2, right + 2]``.

    What is not limited has size 1. Sizes pass through activation checkpointing and torch.compile, and no mask that
    a model could mean otherwise has five dimensions.
    """
    sizes = [1 if limit is None else limit + 2 for limit in (padded.band.left, padded.band.right)]
    return padded.key_mask[:, :, None, None, None].expand(-1, -1, 1, *sizes)


def from_carried(mask: Tensor) -> Padded:
    """The way back."""
    left, right = (None if size == 1 else size - 2 for size in mask.shape[3:])
    return Padded(mask[:, :, 0, 0, 0], Band(left, right))


def is_carried(mask: Tensor | None) -> bool:
    """Whether :func:`carried` made ``mask``."""
    return mask is not None and mask.dim() == 5


def dense(padded: Padded, queries: int) -> Tensor:
    """What a query sees, bool ``[B, 1, queries, Lk]``."""
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
    """Whether of all sequences only the end is padding: a bool of no dimensions."""
    return ~(key_mask[:, 1:] & ~key_mask[:, :-1]).any()
