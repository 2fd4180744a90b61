"""Products of whole tiles: chains of wgmma over all of K, issued back to back."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import slice_words
from cuda_kernels.device.language import asm, device, i32
from cuda_kernels.device.sm90 import wgmma, wgmma_commit, wgmma_rs
from cuda_kernels.device.swizzle import ROW_BYTES, advance_descriptor

_PANEL = 128 * ROW_BYTES
"""Bytes from 128 channels of a tile of 128 rows to the next 128."""
_STEP = 32
"""Bytes of a row that one wgmma multiplies."""

found_again = asm("mov.b32 $0, $1;", i32, i32)
"""The same number. What follows from it in a loop is computed there: kept ready, it would take registers."""

thread_again = asm("mov.u32 $0, %tid.x;", i32)
"""``threadIdx.x``, read where it is needed, for the same reason."""


@cache
def make_product(n: int, k_steps: int, panels: int = 1) -> Any:
    """A device function ``(acc, a, b, keep) -> acc`` that starts ``A [64, K] Bᵀ [K, n]`` of E4M3 codes.

    ``a``, ``b``: matrix descriptors. ``K``: 32 ``k_steps`` channels of each of ``panels`` panels of 128 rows. The
    products are a group of their own.
    """
    offsets = [panel * _PANEL + _STEP * step for panel in range(panels) for step in range(k_steps)]
    return _chain(wgmma(n, "e4m3", "e4m3"), [(_advanced(offset), offset) for offset in offsets])


@cache
def make_register_product(n: int, k_steps: int) -> Any:
    """:func:`make_product` of one panel with ``a`` the words of A: four for each 32 of K."""
    parts = [(slice_words(4 * k_steps, 4 * step, 4), _STEP * step) for step in range(k_steps)]
    return _chain(wgmma_rs(n, "e4m3", "e4m3"), parts)


def _advanced(offset: int) -> Any:
    return device(lambda descriptor: advance_descriptor(descriptor, offset))


def _chain(multiply: Any, steps: list[tuple[Any, int]]) -> Any:
    """Products that each take their part of A by a function of ``a``, and of B some bytes behind ``b``; then a commit.

    The first one replaces ``acc``, unless ``keep`` is 1.
    """
    if not steps:

        @device
        def commit(acc, a, b, keep):
            wgmma_commit()
            return acc

        return commit
    (part_of, offset), rest = steps[0], _chain(multiply, steps[1:])

    @device
    def issue(acc, a, b, keep):
        return rest(multiply(acc, part_of(a), advance_descriptor(b, offset), keep), a, b, 1)

    return issue
