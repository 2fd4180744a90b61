"""Products of whole tiles: chains of wgmma over all of K, issued back to back."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import slice_words
from cuda_kernels.device.language import asm, device, i32
from cuda_kernels.device.sm90 import wgmma, wgmma_commit, wgmma_rs
from cuda_kernels.device.swizzle import ROW_BYTES, advance_descriptor

_PANEL = 128 * ROW_BYTES
"""Bytes between panels of 128 channels of a tile of 128 rows."""
_STEP = 32
"""Bytes of a row multiplied by one wgmma."""

found_again = asm("mov.b32 $0, $1;", i32, i32)
"""The same number, opaque to the compiler: values derived from it are computed in the loop, not kept in registers."""

thread_again = asm("mov.u32 $0, %tid.x;", i32)
"""``threadIdx.x``, read again where it is used, for the same reason."""


@cache
def make_product(n: int, k_steps: int, panels: int = 1) -> Any:
    """A device function ``(acc, a, b, keep) -> acc`` that issues ``A [64, K] Bᵀ [K, n]`` of E4M3 codes.

    ``a``, ``b``: matrix descriptors. ``K``: 32 ``k_steps`` channels of each of ``panels`` panels of 128 rows. The
    products are committed as one group.
    """
    offsets = [panel * _PANEL + _STEP * step for panel in range(panels) for step in range(k_steps)]
    return _chain(wgmma(n, "e4m3", "e4m3"), [(_advanced(offset), offset) for offset in offsets])


@cache
def make_register_product(n: int, k_steps: int) -> Any:
    """:func:`make_product` for one panel, where ``a`` is the words of A in registers: four per 32 of K."""
    parts = [(slice_words(4 * k_steps, 4 * step, 4), _STEP * step) for step in range(k_steps)]
    return _chain(wgmma_rs(n, "e4m3", "e4m3"), parts)


def _advanced(offset: int) -> Any:
    return device(lambda descriptor: advance_descriptor(descriptor, offset))


def _chain(multiply: Any, steps: list[tuple[Any, int]]) -> Any:
    """Issue products in sequence, then commit.

    A step is a function from ``a`` to its part of A, and its offset from ``b``. The first one
    replaces ``acc``, unless ``keep`` is 1.
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
