"""Checks of results: what they are compared with, and with which tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Tolerances for float32 values computed in another order; two different FP8 values are further apart."""


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether ``actual`` is ``expected`` repeated, bitwise."""
    whole = _over_and_over(expected, actual)
    return whole is not None and torch.equal(_bits(actual), _bits(whole))


def close(actual: Tensor, expected: Tensor, share: float) -> bool:
    """Whether at least ``share`` of the values of ``actual`` are close to those of ``expected`` repeated."""
    whole = _over_and_over(expected, actual)
    if whole is None or not actual.numel():
        return whole is not None
    near = torch.isclose(actual.float(), whole.float(), RELATIVE, ABSOLUTE)
    return bool(near.float().mean() >= share)


def poisoned(outcome: Callable[[], list[Tensor]]) -> list[Tensor]:
    """``outcome()`` computed in memory filled with NaN instead of an earlier call's result, so that gaps are detected.

    It relies on the caching allocator, which reuses the memory that was freed last.
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
