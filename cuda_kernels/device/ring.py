"""A ring of shared-memory stages: the index and phase of the next stage."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import device, i32


@cache
def stage_counters(stages: int) -> Any:
    """A device function ``(stage_idx, phase) -> (stage_idx, phase)`` of the next iteration, in a ring of ``stages``.

    A phase is the parity of a stage's round.
    """
    last_stage = stages - 1

    @device
    def next_stage(stage_idx, phase):
        if stage_idx == last_stage:
            return i32(0), i32(phase ^ 1)
        return i32(stage_idx + 1), phase

    return next_stage
