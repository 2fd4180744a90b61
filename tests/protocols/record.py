"""The protocol of a launch: the programs of its threads, as the emulator saw them do it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cuda_kernels.host.launch import Argument
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.emulated import passed, program_of, ptx_of
from tests.protocols.protocol import (
    Arrive,
    Copy,
    Init,
    Join,
    Met,
    Multiplied,
    Multiply,
    Op,
    Place,
    Process,
    Protocol,
    Read,
    Step,
    Wait,
)
from tests.ptx_on_cpu.trace import Kind, Trace

WARP, WARPS, IN_REGISTERS, ROW = 32, 4, 2**32 - 1, 128
KIND, RANK, THREAD, LINE, A, B, C, D = range(8)
FIELDS = LINE, A, B, C, D


def recorded(kernel: Kernel, args: Sequence[Argument | float]) -> Protocol:
    """Run a block of ``kernel`` once, and return what its threads did."""
    trace = Trace()
    program_of(ptx_of(kernel)).launch(
        (1, 1, 1),
        (kernel.threads, 1, 1),
        [passed(arg) for arg in args],
        dynamic_shared=kernel.shared_bytes,
        races=False,
        trace=trace,
    )
    return protocol_of(trace.events, kernel.threads, 1)


def protocol_of(events: np.ndarray, threads: int, blocks: int) -> Protocol:
    """The programs of ``threads`` threads of each of ``blocks`` blocks; those of a warp that are equal are one."""
    loads = events[events[:, KIND] == Kind.LOAD].tolist()
    buffers = _Buffers({place for *_, a, b, _, d in loads for place in _filled(a, b, d, blocks)})
    events = _by_thread(_reads_of_buffers(events, buffers))
    numbers = events[:, RANK].astype(np.int64) * threads + events[:, THREAD]
    ends = np.searchsorted(numbers, np.arange(blocks * threads), side="right")
    starts = np.searchsorted(numbers, np.arange(blocks * threads))
    processes = []
    for first in range(0, blocks * threads, WARP):
        rank, warp = first // threads, first % threads // WARP
        classes: dict[bytes, list[int]] = defaultdict(list)
        for lane in range(WARP):
            own = events[starts[first + lane] : ends[first + lane]]
            classes[own[:, [KIND, *FIELDS]].tobytes()].append(lane)
        for lanes in classes.values():
            own = events[starts[first + lanes[0]] : ends[first + lanes[0]]]
            steps = _program(own[:, [KIND, *FIELDS]].tolist(), rank, warp, threads, blocks, buffers)
            if len(classes) == 1:
                steps = [step for step in steps if not _is_of_warp(step.op)]
            name = f"block {rank}, warp {warp}, lanes {lanes[0]} to {lanes[-1]}"
            processes.append(Process(name, rank, warp // WARPS, len(lanes), tuple(steps)))
    return tuple(processes)


def _reads_of_buffers(events: np.ndarray, buffers: _Buffers) -> np.ndarray:
    """Loads as such of the whole buffers that they touch; those of other memory are left out."""
    reads = np.flatnonzero(events[:, KIND] == Kind.READ)
    a, b, c = events[reads][:, [A, B, C]].astype(np.int64).T
    _, first, which = np.unique(b << 40 | c << 20 | a, return_index=True, return_inverse=True)
    touched = [buffers.touched(int(b[each]), int(a[each]), int(c[each])) for each in first]
    starts = np.array([places[0].start if places else 0 for places in touched], np.int64)
    ends = np.array([places[-1].end if places else 0 for places in touched], np.int64)
    events[reads, A], events[reads, C] = starts[which], (ends - starts)[which]
    return events[(events[:, KIND] != Kind.READ) | (events[:, C] > 0)]


def _by_thread(events: np.ndarray) -> np.ndarray:
    """Each thread's in their order; a load once where a thread repeats it."""
    events = events[np.lexsort((events[:, THREAD], events[:, RANK]))]
    same = (events[1:, [KIND, RANK, THREAD, A, B, C]] == events[:-1, [KIND, RANK, THREAD, A, B, C]]).all(1)
    return events[np.concatenate([[True], ~(same & (events[1:, KIND] == Kind.READ))])]


class _Buffers:
    """Memory that is copied to. What is read counts as all of the copies that it touches."""

    def __init__(self, places: set[Place]) -> None:
        self._places = places
        self._found: dict[tuple[int, int, int], tuple[Place, ...]] = {}

    def touched(self, rank: int, start: int, size: int) -> tuple[Place, ...]:
        key = rank, start, size
        if key not in self._found:
            place = Place(rank, start, start + size)
            self._found[key] = tuple(sorted(each for each in self._places if each.overlaps(place)))
        return self._found[key]


def _filled(start: int, size: int, mask: int, blocks: int) -> tuple[Place, ...]:
    return tuple(Place(rank, start, start + size) for rank in range(blocks) if mask >> rank & 1)


def _is_of_warp(op: Op) -> bool:
    return isinstance(op, Join | Met) and op.meeting[0] == "warp"


def _program(
    events: Sequence[Sequence[int]], rank: int, warp: int, threads: int, blocks: int, buffers: _Buffers
) -> list[Step]:
    """Of one thread. Lanes meet at what is ``.aligned``, and products between two other operations are one."""
    group = (rank, warp // WARPS)
    of_warp, of_cluster = ("warp", rank, warp), ("cluster", 0, 0)
    steps: list[Step] = []
    number, committed = 0, [0]

    def add(line: int, *ops: Op) -> None:
        steps.extend(Step(op, line) for op in ops)

    for kind, line, a, b, c, d in events:
        meet = Join(of_warp, WARP), Met(of_warp)
        if kind == Kind.INIT:
            add(line, Init((rank, a), b))
        elif kind == Kind.ARRIVE:
            assert c == 1, "no kernel arrives for others"
            add(line, Arrive((b, a), d))
        elif kind == Kind.WAIT:
            add(line, Wait((rank, a), b))
        elif kind == Kind.LOAD:
            add(line, Copy(_filled(a, b, d, blocks), c))
        elif kind == Kind.READ:
            add(line, *map(Read, buffers.touched(b, a, c)))
        elif kind == Kind.WGMMA:
            # 128 bytes of each row; an operand that steps along K begins within its first row.
            operands = [(at // ROW * ROW, size) for at, size in ((a, b), (c, d)) if at != IN_REGISTERS]
            found = [buffers.touched(rank, at, size) for at, size in operands]
            assert all(found), "a product of memory that nothing is copied to"
            touched = set().union(*found)
            last = steps[-1].op if steps else None
            if isinstance(last, Multiply):
                steps[-1] = Step(last._replace(places=tuple(sorted({*last.places, *touched}))), steps[-1].line)
            else:
                add(line, *meet, Multiply(group, number, tuple(sorted(touched))))
                number += 1
        elif kind == Kind.COMMIT:
            committed.append(number)
            add(line, *meet)
        elif kind == Kind.WGMMA_WAIT:
            add(line, *meet, Multiplied(group, committed[max(len(committed) - 1 - a, 0)]))
        elif kind in (Kind.BARRIER, Kind.BARRIER_ARRIVE):
            name = ("bar", rank, a)
            add(line, *meet, Join(name, b or threads))
            if kind == Kind.BARRIER:
                add(line, Met(name))
        elif kind == Kind.WARP:
            assert a == 2**WARP - 1, "all lanes"
            add(line, *meet)
        elif kind == Kind.CLUSTER_ARRIVE:
            add(line, Join(of_cluster, threads * blocks))
        elif kind == Kind.CLUSTER_WAIT:
            add(line, Met(of_cluster))
    return steps
