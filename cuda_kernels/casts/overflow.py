"""Overflow and underflow counts of casts to FP8, and launch bounds of their kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_kernels.device.codec import FP8_MAX
from cuda_kernels.device.language import device, i64, u32
from cuda_kernels.device.ptx import atomic_add, float8x4, warp_sum
from cuda_kernels.device.tile import TileLoader

_SMALLEST = {"e4m3": np.float32(2.0**-9), "e5m2": np.float32(2.0**-16)}
_ZERO = np.float32(0)


def min_blocks_per_sm(loader: TileLoader, count: bool, casts: int = 1) -> int:
    """Blocks per multiprocessor that registers allow; a second cast keeps the float32 values of the first."""
    return max(1, loader.min_blocks_per_sm - int(count) - (casts - 1))


@cache
def counting_cast(fp8: str, count: bool) -> Any:
    """A device function ``(quad, scale_a, scale_b, scale_c, scale_d) -> codes, overflows`` that casts four float32.

    ``codes``: a register with the four codes. ``overflows``: the number of saturated values (overflow) in the low half,
    and of values flushed to zero (underflow) in the high half; 0 unless ``count``.
    """
    pack = float8x4[fp8]
    largest = FP8_MAX[fp8]
    half_smallest = _SMALLEST[fp8] / np.float32(2)

    @device
    def count_one(value, scale):
        product = abs(value * scale)
        saturated = u32(1) if product > largest else u32(0)
        # Half of the smallest value is a tie, which rounds to zero.
        flushed = u32(0x10000) if product <= half_smallest and value != _ZERO else u32(0)
        return saturated + flushed

    @device
    def cast(quad, scale_a, scale_b, scale_c, scale_d):
        a, b, c, d = quad
        codes, overflows = pack(a * scale_a, b * scale_b, c * scale_c, d * scale_d), u32(0)
        if count:
            overflows = count_one(a, scale_a) + count_one(b, scale_b) + count_one(c, scale_c) + count_one(d, scale_d)
        return codes, overflows

    return cast


@device
def add_overflow_counts(counts, overflows, lane):
    """Add a warp's packed counts to the int64 ``counts [2]``: saturated, flushed to zero."""
    saturated, flushed = warp_sum(overflows & u32(0xFFFF)), warp_sum(overflows >> u32(16))
    if lane == 0:
        atomic_add(counts, i64(saturated))
        atomic_add(counts + 8, i64(flushed))
