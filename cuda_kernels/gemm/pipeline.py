"""Release of a stage of the ring of :mod:`.wgmma` by its consumers."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import device
from cuda_kernels.device.sm90 import mbarrier_arrive, mbarrier_arrive_remote, syncwarp


@cache
def make_consumer_release(empty_offset: int, cluster: int, each_warp: bool) -> Any:
    """A device function ``(smem, stage_idx, wg_thread)`` by which a warpgroup arrives at a stage's ``empty`` barrier.

    It arrives in every block of the cluster, since all of them write to the stage. One thread arrives for its
    warpgroup, because wgmma completes for all of it. With ``each_warp``, for scales that are read by plain loads, one
    thread of each warp arrives. ``wg_thread``: the thread's index in its warpgroup.
    """

    @device
    def consumer_release(smem, stage_idx, wg_thread):
        empty = smem + empty_offset + 8 * stage_idx
        arriving_lane = wg_thread
        if each_warp:
            syncwarp()
            arriving_lane = wg_thread & 31
        if cluster == 1:
            if arriving_lane == 0:
                mbarrier_arrive(empty)
        elif arriving_lane < cluster:
            mbarrier_arrive_remote(empty, arriving_lane)

    return consumer_release
