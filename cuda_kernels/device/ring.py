"""A ring of shared-memory stages: the index and phase of the next stage."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import device, i32
from cuda_kernels.device.ptx import quotient, remainder


@cache
def stage_counters(stages: int) -> tuple[Any, Any]:
    """Device functions for a ring of ``stages``; a phase is the parity of a stage's round.

    Returns:
        ``(stage_idx, phase) -> (stage_idx, phase)`` of the next iteration, and
        ``(stage_idx, phase, k_iters) -> (stage_idx, phase)`` of the iteration ``k_iters`` later.
    """
    last_stage = stages - 1

    @device
    def next_stage(stage_idx, phase):
        if stage_idx == last_stage:
            return i32(0), i32(phase ^ 1)
        return i32(stage_idx + 1), phase

    @device
    def stage_after(stage_idx, phase, k_iters):
        there = i32(stage_idx + k_iters)
        return remainder(there, i32(stages)), i32((phase ^ quotient(there, i32(stages))) & 1)

    return next_stage, stage_after
