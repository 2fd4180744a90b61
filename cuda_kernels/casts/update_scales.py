"""The delayed-scaling update of all tensors of a model in one launch."""

from __future__ import annotations

from functools import cache

import numpy as np

from cuda_kernels.device.language import cuda, f32, i32, i64, u32
from cuda_kernels.device.ptx import (
    bits,
    divide,
    dynamic_shared,
    from_bits,
    load_f32,
    shared_load_4,
    shared_store_4,
    store_f32,
    unsigned_max,
)
from cuda_kernels.kernel import Kernel, typed

SLOTS = 32
"""Slots (one per tensor) of a block. Their amaxes of one step are contiguous, so that a warp reads 128 bytes."""
WARPS = 32
STEPS = 8
"""Steps of the history that a warp shifts at a time, so that the loads overlap."""

_ZERO = np.float32(0)
_INFINITY = np.float32(np.inf)
_LARGEST = np.finfo(np.float32).max


@cache
def update_scales_kernel(most_recent: bool) -> Kernel:
    """Append ``amaxes [n]`` to ``amax_history [length, n]``, oldest first, compute ``scale [n]``, zero ``amaxes``.

    A tensor whose amax is 0, inf or NaN keeps its history and scale. The history's first step is set to 0.
    ``power``: 2**-margin.
    """

    use_history_max = not most_recent

    def update_scales(amaxes, amax_history, scale, fp8_max, power, length, n):
        thread = cuda.threadIdx.x
        lane, warp = thread & 31, thread >> 5
        slot = cuda.blockIdx.x * SLOTS + lane
        inside = slot < n
        byte_offset = i64(slot) * 4
        newest = _ZERO
        if inside:
            newest = load_f32(amaxes + byte_offset)
        usable = _ZERO < newest < _INFINITY
        shifted = cuda.local.array(STEPS, f32)
        largest = newest if usable else _ZERO
        start = i32(0)
        # A warp reads the steps after its own before any warp overwrites them.
        while start < length:
            first_step = start + warp * STEPS
            if usable:
                for index in range(STEPS):
                    step = first_step + index
                    shifted[index] = newest
                    if step + 1 < length:
                        shifted[index] = load_f32(amax_history + i64(step + 1) * n * 4 + byte_offset)
                        largest = shifted[index] if shifted[index] > largest else largest
            cuda.syncthreads()
            if usable:
                for index in range(STEPS):
                    step = first_step + index
                    if step < length:
                        store_f32(
                            amax_history + i64(step) * n * 4 + byte_offset, _ZERO if step == 0 else shifted[index]
                        )
            elif inside and first_step == 0:
                store_f32(amax_history + byte_offset, _ZERO)
            start += WARPS * STEPS
        smem = dynamic_shared()
        if use_history_max:
            shared_store_4(smem + thread * 4, bits(largest))
            cuda.syncthreads()
        if warp == 0 and inside:
            if usable:
                amax = newest
                if use_history_max:
                    highest = u32(0)
                    for other_warp in range(WARPS):
                        highest = unsigned_max(highest, shared_load_4(smem + (other_warp * SLOTS + lane) * 4))
                    amax = from_bits(highest)
                new = divide(load_f32(fp8_max + byte_offset) * power, amax)
                store_f32(scale + byte_offset, new if new < _LARGEST else _LARGEST)
            store_f32(amaxes + byte_offset, _ZERO)

    return Kernel(
        f"update_scales({most_recent=})",
        update_scales,
        {**typed(i64, "amaxes amax_history scale fp8_max"), "power": f32, **typed(i32, "length n")},
        SLOTS * WARPS,
        shared_bytes=SLOTS * WARPS * 4,
    )
