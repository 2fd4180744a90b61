"""Whether a result is right: what it is compared with, and how closely."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""How far apart two float32 may be that were computed in another order; two FP8 values that differ are farther."""


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether ``actual`` is ``expected`` over and over, to the bit."""
    whole = _over_and_over(expected, actual)
    return whole is not None and torch.equal(_bits(actual), _bits(whole))


def close(actual: Tensor, expected: Tensor, share: float) -> bool:
    """Whether at least ``share`` of the values of ``actual`` are those of ``expected`` over and over."""
    whole = _over_and_over(expected, actual)
    if whole is None or not actual.numel():
        return whole is not None
    near = torch.isclose(actual.float(), whole.float(), RELATIVE, ABSOLUTE)
    return bool(near.float().mean() >= share)


def poisoned(outcome: Callable[[], list[Tensor]]) -> list[Tensor]:
    """``outcome()`` in memory that held NaN before, not the right result of an earlier call: a gap is seen.

    A caching allocator hands out the memory that it was given back last.
    """
    for tensor in outcome():
        _bits(tensor).fill_(-1)
    del tensor
    return outcome()


def _over_and_over(expected: Tensor, actual: Tensor) -> Tensor | None:
    """``expected`` repeated to the shape of ``actual``, on its device; None if they do not fit."""
    if actual.dtype != expected.dtype or actual.dim() != expected.dim():
        return None
    times = [have // max(want, 1) for have, want in zip(actual.shape, expected.shape)]
    whole = _bits(expected).to(actual.device).repeat(times).view(expected.dtype)
    return whole if whole.shape == actual.shape else None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
