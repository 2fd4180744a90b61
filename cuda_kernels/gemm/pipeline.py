"""When a consumer gives a stage of the ring of :mod:`.wgmma` back."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_kernels.device.language import device
from cuda_kernels.device.sm90 import mbarrier_arrive, mbarrier_arrive_remote, syncwarp


@cache
def make_consumer_release(empty_offset: int, cluster: int, each_warp: bool) -> Any:
    """A device function ``(smem, stage_idx, wg_thread)``: a warpgroup arrives at the ``empty`` barrier of a stage.

    It arrives in every block of the cluster, since all of them write to the stage. One thread arrives for its
    warpgroup, because wgmma completes for all of it; with ``each_warp``, where scales are read by plain loads, one of
    each warp. ``wg_thread``: the thread's number in its warpgroup.
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
