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
    of_threads: dict[tuple[int, int], list[Event]] = {(r, t): [] for r in range(blocks) for t in range(threads)}
    places: set[Place] = set()
    for event in events:
        of_threads[event.rank, event.thread].append(event)
        if event.kind == Kind.LOAD:
            places.update(_filled(event, blocks))
    buffers = _Buffers(places)
    processes = []
    for rank in range(blocks):
        for warp in range(threads // WARP):
            classes: dict[tuple[Step, ...], list[int]] = defaultdict(list)
            for lane in range(WARP):
                own = of_threads[rank, warp * WARP + lane]
                classes[_program(own, rank, warp, threads, blocks, buffers)].append(lane)
            for steps, lanes in classes.items():
                name = f"block {rank}, warp {warp}, lanes {lanes[0]} to {lanes[-1]}"
                if len(classes) == 1:
                    steps = tuple(step for step in steps if not _is_of_warp(step.op))
                processes.append(Process(name, rank, warp // WARPS, len(lanes), steps))
    return tuple(processes)


class _Buffers:
    """Memory that is copied to. What is read counts as all of the copies that it touches."""

    def __init__(self, places: set[Place]) -> None:
        self._places = places
        self._found: dict[Place, tuple[Place, ...]] = {}

    def touched(self, place: Place) -> tuple[Place, ...]:
        if place not in self._found:
            self._found[place] = tuple(sorted(each for each in self._places if each.overlaps(place)))
        return self._found[place]


def _filled(load: Event, blocks: int) -> tuple[Place, ...]:
    return tuple(Place(rank, load.a, load.a + load.b) for rank in range(blocks) if load.d >> rank & 1)


def _is_of_warp(op: Op) -> bool:
    return isinstance(op, Join | Met) and op.meeting[0] == "warp"


def _program(
    events: Sequence[Event], rank: int, warp: int, threads: int, blocks: int, buffers: _Buffers
) -> tuple[Step, ...]:
    """Of one thread. Lanes meet at what is ``.aligned``, and products between two other operations are one."""
    group = (rank, warp // WARPS)
    of_warp, of_cluster = ("warp", rank, warp), ("cluster", 0, 0)
    steps: list[Step] = []
    number, committed = 0, [0]

    def meet(name: tuple[str, int, int], size: int, line: int) -> None:
        steps.extend((Step(Join(name, size), line), Step(Met(name), line)))

    for event in events:
        kind, line, a, b, c, d = event.kind, event.line, event.a, event.b, event.c, event.d
        if kind == Kind.INIT:
            steps.append(Step(Init((rank, a), b), line))
        elif kind == Kind.ARRIVE:
            steps += [Step(Arrive((b, a), d if i == 0 else 0), line) for i in range(c)]
        elif kind == Kind.WAIT:
            steps.append(Step(Wait((rank, a), b), line))
        elif kind == Kind.LOAD:
            steps.append(Step(Copy(_filled(event, blocks), c), line))
        elif kind == Kind.READ:
            reads = [Step(Read(place), line) for place in buffers.touched(Place(b, a, a + c))]
            steps += [step for step in reads if step.op not in _last_reads(steps)]
        elif kind == Kind.WGMMA:
            # A's 64 rows or B's, 128 bytes of each; an operand that steps along K begins within its first row.
            operands = [Place(rank, at // ROW * ROW, at // ROW * ROW + size) for at, size in ((a, b), (c, d))]
            read = {x for x, at in zip(operands, (a, c)) if at != IN_REGISTERS}
            touched = {place for each in read for place in buffers.touched(each)}
            last = steps[-1].op if steps else None
            if isinstance(last, Multiply):
                merged = Multiply(group, last.number, tuple(sorted({*last.places, *touched})))
                steps[-1] = Step(merged, steps[-1].line)
            else:
                meet(of_warp, WARP, line)
                steps.append(Step(Multiply(group, number, tuple(sorted(touched))), line))
                number += 1
        elif kind == Kind.COMMIT:
            committed.append(number)
            meet(of_warp, WARP, line)
        elif kind == Kind.WGMMA_WAIT:
            meet(of_warp, WARP, line)
            steps.append(Step(Multiplied(group, committed[max(len(committed) - 1 - a, 0)]), line))
        elif kind in (Kind.BARRIER, Kind.BARRIER_ARRIVE):
            meet(of_warp, WARP, line)
            name = ("bar", rank, a)
            steps.append(Step(Join(name, b or threads), line))
            if kind == Kind.BARRIER:
                steps.append(Step(Met(name), line))
        elif kind == Kind.WARP:
            assert a == 2**WARP - 1, "all lanes"
            meet(of_warp, WARP, line)
        elif kind == Kind.CLUSTER_ARRIVE:
            steps.append(Step(Join(of_cluster, threads * blocks), line))
        elif kind == Kind.CLUSTER_WAIT:
            steps.append(Step(Met(of_cluster), line))
    return tuple(steps)


def _last_reads(steps: Sequence[Step]) -> set[Op]:
    """Reads that nothing else follows."""
    found: set[Op] = set()
    for step in reversed(steps):
        if not isinstance(step.op, Read):
            break
        found.add(step.op)
    return found
