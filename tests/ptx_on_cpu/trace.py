"""The record of a launch: synchronization of its threads, and copies to and reads of shared memory."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Kind(IntEnum):
    """TraceKind of runtime.h. Addresses are byte offsets in the shared memory of a block.

    Attributes:
        INIT: a new mbarrier at ``a`` with a count of ``b``.
        ARRIVE: at the mbarrier at ``a`` of the cluster's block ``b``: ``c`` arrivals, after ``d`` bytes are expected.
        WAIT: a wait at the mbarrier at ``a`` for the phase of parity ``b`` that succeeded.
        LOAD: a bulk copy to ``a``, ``b`` bytes, signals the mbarrier at ``c``, in each block of the mask ``d``.
        WGMMA: a product of ``b`` bytes from ``a`` on, all ones if they are in registers, and ``d`` from ``c`` on.
        COMMIT: the end of a group of products.
        WGMMA_WAIT: until all but ``a`` groups are done.
        BARRIER, BARRIER_ARRIVE: at the named barrier ``a`` for ``b`` threads, 0 for all; the second does not wait.
        WARP: bar.warp.sync of the lanes ``a``.
        CLUSTER_ARRIVE, CLUSTER_WAIT: at the cluster's barrier.
        READ: ``c`` bytes at ``a`` in the cluster's block ``b``.
    """

    INIT = 0
    ARRIVE = 1
    WAIT = 2
    LOAD = 3
    WGMMA = 4
    COMMIT = 5
    WGMMA_WAIT = 6
    BARRIER = 7
    BARRIER_ARRIVE = 8
    WARP = 9
    CLUSTER_ARRIVE = 10
    CLUSTER_WAIT = 11
    READ = 12


class Trace:
    """Events of the threads, in the order of execution.

    Attributes:
        events: uint32 ``[events, 8]``: :class:`Kind`, the block's rank, the thread, the PTX line, a, b, c and d.
    """

    CAPACITY = 1 << 19

    def __init__(self) -> None:
        self.events = np.empty((self.CAPACITY, 8), np.uint32)
