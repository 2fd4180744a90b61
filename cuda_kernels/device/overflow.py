"""What casts to FP8 share: the counts of values that a format cannot hold, and the pitches of their results."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import FP8_MAX
from cuda_kernels.device.language import device, i64, u32
from cuda_kernels.device.ptx import atomic_add, warp_sum
from cuda_kernels.device.tile import Source

PITCHES = (i64, i64, i64, i64)
"""A kernel's last parameters: the pitches of codes and scales, of the rowwise and of the transposed copy."""

_SMALLEST = {"e4m3": np.float32(2.0**-9), "e5m2": np.float32(2.0**-16)}
_ZERO = np.float32(0)


def fitting(source: Source, count: bool, casts: int = 1) -> int:
    """How many blocks fit into a multiprocessor: a second cast keeps the float32 of the first in registers."""
    return max(1, source.blocks - int(count) - (casts - 1))


@cache
def losses_of(fp8: str) -> Any:
    """A device function ``(a, b, c, d, p, q, r, s) -> losses`` of four values, each before the cast with its scale.

    Losses count the saturated in their low half and those flushed to zero in their high half.
    """
    largest = FP8_MAX[fp8]
    half_smallest = _SMALLEST[fp8] / np.float32(2)

    @device
    def lost(value, scale):
        product = abs(value * scale)
        saturated = u32(1) if product > largest else u32(0)
        # Half of the smallest is a tie, which rounds to zero.
        flushed = u32(0x10000) if product <= half_smallest and value != _ZERO else u32(0)
        return saturated + flushed

    @device
    def losses(a, b, c, d, p, q, r, s):
        return lost(a, p) + lost(b, q) + lost(c, r) + lost(d, s)

    return losses


@device
def add_losses(counts, losses, lane):
    """Add a warp's losses to the int64 ``counts [2]``: saturated, flushed to zero."""
    saturated, flushed = warp_sum(losses & u32(0xFFFF)), warp_sum(losses >> u32(16))
    if lane == 0:
        atomic_add(counts, i64(saturated))
        atomic_add(counts + 8, i64(flushed))
