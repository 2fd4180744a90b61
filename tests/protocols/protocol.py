"""What a kernel's threads do with barriers and with shared memory that is copied to: one straight program for each.

A program depends on the number of tiles alone, never on data, so that programs and the meaning of their operations are
the whole automaton. Operations mean what the PTX ISA says of mbarriers ("Parallel Synchronization and Communication
Instructions: mbarrier"), of ``bar`` and of ``wgmma``. Fences between proxies are not among them; the emulator has them.
"""

from __future__ import annotations

from typing import NamedTuple

Barrier = tuple[int, int]
"""An mbarrier: its block's rank in the cluster, and its place in shared memory."""


class Place(NamedTuple):
    """Bytes ``start`` up to ``end`` of the shared memory of a block."""

    rank: int
    start: int
    end: int

    def overlaps(self, other: Place) -> bool:
        return self.rank == other.rank and self.start < other.end and other.start < self.end


class Init(NamedTuple):
    """A new mbarrier in phase 0 that takes so many ``arrivals`` for each phase."""

    barrier: Barrier
    arrivals: int


class Arrive(NamedTuple):
    """``size`` more bytes are expected in the phase, then one arrival of each thread."""

    barrier: Barrier
    size: int = 0


class Wait(NamedTuple):
    """Goes on while the last phase that is complete has this parity; before phase 0 that of a phase -1, which is 1."""

    barrier: Barrier
    parity: int


class Copy(NamedTuple):
    """Starts to fill ``places``; each signals, when it is full, the mbarrier of the same block at ``barrier``."""

    places: tuple[Place, ...]
    barrier: int


class Read(NamedTuple):
    """A load by the threads themselves."""

    place: Place


class Multiply(NamedTuple):
    """Starts product ``number`` of the warpgroup ``group``: for this warp its reads may begin.

    It ends for all four warps at once, after all have started it. So kernels of CUTLASS rely on it, where one thread of
    a warpgroup releases a stage; warps do not wait for each other to start.
    """

    group: tuple[int, int]
    number: int
    places: tuple[Place, ...]


class Multiplied(NamedTuple):
    """Waits for the end of all products of the warpgroup before ``number``."""

    group: tuple[int, int]
    number: int


class Join(NamedTuple):
    """Takes part in the next meeting of ``size`` threads: of ``bar``, of a warp, or of a cluster."""

    meeting: tuple[str, int, int]
    size: int


class Met(NamedTuple):
    """Waits until the meeting that was joined last takes place."""

    meeting: tuple[str, int, int]


Op = Init | Arrive | Wait | Copy | Read | Multiply | Multiplied | Join | Met


class Step(NamedTuple):
    """An operation, and the PTX line that it came from; 0 if none did."""

    op: Op
    line: int = 0


class Process(NamedTuple):
    """``threads`` of one warp that do the same.

    Attributes:
        name: whom messages speak of.
        rank, warpgroup: where they are.
    """

    name: str
    rank: int
    warpgroup: int
    threads: int
    steps: tuple[Step, ...]


Protocol = tuple[Process, ...]
