"""The protocol of a launch: the programs of its threads, as the emulator saw them do it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
from tests.ptx_on_cpu.trace import Event, Kind

WARP, WARPS, IN_REGISTERS, ROW = 32, 4, 2**32 - 1, 128


def recorded(kernel: Kernel, blocks: int, args: Sequence[Argument | float]) -> Protocol:
    """Run ``kernel`` once, and return what its threads did."""
    events: list[Event] = []
    program_of(ptx_of(kernel)).launch(
        (blocks, 1, 1),
        (kernel.threads, 1, 1),
        [passed(arg) for arg in args],
        cluster=(kernel.cluster, 1, 1),
        dynamic_shared=kernel.shared_bytes,
        races=False,
        trace=events,
    )
    assert blocks == kernel.cluster, "a trace is of one cluster"
    return protocol_of(events, kernel.threads, blocks)


def protocol_of(events: Sequence[Event], threads: int, blocks: int) -> Protocol:
    """The programs of ``threads`` threads of each of ``blocks`` blocks; those of a warp that are equal are one."""
    buffers = _Buffers({place for event in events if event.kind == Kind.LOAD for place in _filled(event, blocks)})
    did: dict[tuple[int, int], list[Event]] = {(r, t): [] for r in range(blocks) for t in range(threads)}
    for event in events:
        own = did[event.rank, event.thread]
        if event.kind == Kind.READ:
            touched = buffers.touched(event.b, event.a, event.c)
            if not touched or (own and own[-1].kind == Kind.READ and own[-1].a == touched[0].start):
                continue
            event = event._replace(a=touched[0].start, c=touched[-1].end - touched[0].start)
        own.append(event._replace(thread=0))
    processes = []
    for rank in range(blocks):
        for warp in range(threads // WARP):
            classes: dict[tuple[Event, ...], list[int]] = defaultdict(list)
            for lane in range(WARP):
                classes[tuple(did[rank, warp * WARP + lane])].append(lane)
            for own_events, lanes in classes.items():
                steps = _program(own_events, rank, warp, threads, blocks, buffers)
                if len(classes) == 1:
                    steps = [step for step in steps if not _is_of_warp(step.op)]
                name = f"block {rank}, warp {warp}, lanes {lanes[0]} to {lanes[-1]}"
                processes.append(Process(name, rank, warp // WARPS, len(lanes), tuple(steps)))
    return tuple(processes)


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


def _filled(load: Event, blocks: int) -> tuple[Place, ...]:
    return tuple(Place(rank, load.a, load.a + load.b) for rank in range(blocks) if load.d >> rank & 1)


def _is_of_warp(op: Op) -> bool:
    return isinstance(op, Join | Met) and op.meeting[0] == "warp"


def _program(
    events: Sequence[Event], rank: int, warp: int, threads: int, blocks: int, buffers: _Buffers
) -> list[Step]:
    """Of one thread. Lanes meet at what is ``.aligned``, and products between two other operations are one."""
    group = (rank, warp // WARPS)
    of_warp, of_cluster = ("warp", rank, warp), ("cluster", 0, 0)
    steps: list[Step] = []
    number, committed = 0, [0]

    def add(line: int, *ops: Op) -> None:
        steps.extend(Step(op, line) for op in ops)

    for kind, _, _, line, a, b, c, d in events:
        meet = Join(of_warp, WARP), Met(of_warp)
        if kind == Kind.INIT:
            add(line, Init((rank, a), b))
        elif kind == Kind.ARRIVE:
            assert c == 1, "no kernel arrives for others"
            add(line, Arrive((b, a), d))
        elif kind == Kind.WAIT:
            add(line, Wait((rank, a), b))
        elif kind == Kind.LOAD:
            add(line, Copy(_filled(Event(kind, rank, 0, line, a, b, c, d), blocks), c))
        elif kind == Kind.READ:
            add(line, *map(Read, buffers.touched(b, a, c)))
        elif kind == Kind.WGMMA:
            # 128 bytes of each row; an operand that steps along K begins within its first row.
            operands = [(at // ROW * ROW, size) for at, size in ((a, b), (c, d)) if at != IN_REGISTERS]
            touched = {place for at, size in operands for place in buffers.touched(rank, at, size)}
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
