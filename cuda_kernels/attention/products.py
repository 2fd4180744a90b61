"""Products of whole tiles: chains of wgmma over all of K, issued back to back."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.fragments import slice_words
from cuda_kernels.device.language import device
from cuda_kernels.device.sm90 import SMEM_DESC_K_MAJOR_SW128, wgmma, wgmma_commit, wgmma_rs


@device
def descriptor(shared):
    """Of K-major rows of 128 bytes at ``shared``, a multiple of 1024 but for 32-byte steps within the rows."""
    return SMEM_DESC_K_MAJOR_SW128 | ((shared & 0x3FFFF) >> 4)


@cache
def make_product(n: int, k_steps: int) -> Any:
    """A device function ``(acc, x, y, keep) -> acc`` that starts ``A [64, 32 k_steps] Bᵀ [.., n]`` of E4M3 codes.

    ``x``, ``y``: matrix descriptors. It is a group of its own.
    """
    return _chain(wgmma(n, "e4m3", "e4m3"), 0, k_steps)


def _chain(multiply: Any, step: int, k_steps: int) -> Any:
    if step == k_steps:

        @device
        def commit(acc, x, y, keep):
            wgmma_commit()
            return acc

        return commit
    rest = _chain(multiply, step + 1, k_steps)

    @device
    def issue(acc, x, y, keep):
        return rest(multiply(acc, x + 2 * step, y + 2 * step, keep), x, y, 1)

    return issue


@cache
def make_register_product(n: int, k_steps: int) -> Any:
    """:func:`make_product` with ``x`` the words of A: four for each 32 of K."""
    return _register_chain(wgmma_rs(n, "e4m3", "e4m3"), 0, k_steps)


def _register_chain(multiply: Any, step: int, k_steps: int) -> Any:
    if step == k_steps:

        @device
        def commit(acc, x, y, keep):
            wgmma_commit()
            return acc

        return commit
    rest = _register_chain(multiply, step + 1, k_steps)
    words = slice_words(4 * k_steps, 4 * step, 4)

    @device
    def issue(acc, x, y, keep):
        return rest(multiply(acc, words(x), y + 2 * step, keep), x, y, 1)

    return issue
