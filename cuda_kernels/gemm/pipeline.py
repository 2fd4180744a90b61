"""The ring of shared-memory stages of :mod:`.wgmma`: which stage comes next, and when a consumer gives one back."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import device, i32
from cuda_kernels.device.ptx import quotient, remainder
from cuda_kernels.device.sm90 import mbarrier_arrive, mbarrier_arrive_remote, syncwarp


@cache
def stage_counters(stages: int) -> tuple[Any, Any]:
    """Device functions over a ring of ``stages``; a phase is the parity of a stage's round.

    Returns:
        ``(stage_idx, phase) -> (stage_idx, phase)`` of the next iteration, and
        ``(stage_idx, phase, k_iters) -> (stage_idx, phase)`` of the iteration ``k_iters`` further.
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


@cache
def make_consumer_release(empty_offset: int, cluster: int, each_warp: bool) -> Any:
    """A device function ``(smem, stage_idx, thread)``: a warpgroup arrives at the ``empty`` barrier of a stage.

    It arrives in every block of the cluster, since all of them write to the stage. One thread arrives for its
    warpgroup, because wgmma completes for all of it; with ``each_warp``, where scales are read by plain loads, one of
    each warp. ``thread``: within the warpgroup.
    """

    @device
    def consumer_release(smem, stage_idx, thread):
        empty = smem + empty_offset + 8 * stage_idx
        arriving_lane = thread
        if each_warp:
            syncwarp()
            arriving_lane = thread & 31
        if cluster == 1:
            if arriving_lane == 0:
                mbarrier_arrive(empty)
        elif arriving_lane < cluster:
            mbarrier_arrive_remote(empty, arriving_lane)

    return consumer_release
