"""Faults planted into protocols: what a slip in a kernel's source would make of the programs.

A slip is in one statement, which the compiler may have repeated: so it is made in all that one role does with a ring of
barriers. An arrival is lost or repeated at its first time alone, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.protocols.protocol import (
    Arrive,
    Copy,
    Init,
    Join,
    Met,
    Multiply,
    Op,
    Process,
    Protocol,
    Step,
    Wait,
)

Chosen = Callable[[Process, Op], bool]


class Fault(NamedTuple):
    """Attributes:
    kind: of the slip.
    where: whose, and at which barriers: the place of their ring's first one.
    """

    kind: str
    where: str
    protocol: Protocol


def planted(protocol: Protocol, launches: Sequence[Protocol] = ()) -> Iterator[Fault]:
    """``protocol`` with each of the slips that it has a statement for, where that changes a program.

    Args:
        launches: others of its kernel. Where a statement is repeated, one alone may not show all barriers of a ring.
    """
    rings = _rings([protocol, *launches])
    return (fault for fault in _slips(protocol, rings) if fault.protocol != protocol)


def _slips(protocol: Protocol, rings: Mapping[int, tuple[int, ...]]) -> Iterator[Fault]:
    consumers = {process.warpgroup for process in protocol for op, _ in process.steps if isinstance(op, Multiply)}
    for ring in sorted({ring[0] for ring in rings.values()}):
        places = next(each for each in rings.values() if each[0] == ring)

        def of_ring(op: Op, kind: type, places: tuple[int, ...] = places) -> bool:
            return isinstance(op, kind) and isinstance(op, Init | Wait | Arrive) and op.barrier[1] in places

        def initialized(process: Process, op: Op) -> bool:
            return of_ring(op, Init)

        yield Fault("count too large", f"{ring}", _changed(protocol, initialized, lambda op: [_counting(op, 1)]))
        yield Fault("count too small", f"{ring}", _changed(protocol, initialized, lambda op: [_counting(op, -1)]))
        for consumes in (False, True):

            def waits(process: Process, op: Op, consumes: bool = consumes) -> bool:
                return of_ring(op, Wait) and (process.warpgroup in consumers) == consumes

            if _any(protocol, waits):
                where = f"{'consumers' if consumes else 'producer'} at {ring}"
                yield Fault("dropped wait", where, _changed(protocol, waits, lambda op: []))
                yield Fault("wrong parity", where, _changed(protocol, waits, lambda op: [_other_parity(op)]))
                yield Fault("missing stage", where, _changed(protocol, waits, _without_stage(places)))
        for warpgroup in sorted({process.warpgroup for process in protocol}):

            def arrives(process: Process, op: Op, warpgroup: int = warpgroup) -> bool:
                return of_ring(op, Arrive) and process.warpgroup == warpgroup

            if _any(protocol, arrives):
                yield from _at_arrivals(protocol, arrives, f"warpgroup {warpgroup} at {ring}", places)
    early = tuple(
        process._replace(steps=_early(process)) if process.warpgroup in consumers else process for process in protocol
    )
    yield Fault("arrive before the products are done", "all rings", early)
    for name in sorted(_turns(protocol)):

        def takes_turn(process: Process, op: Op, name: tuple[str, int, int] = name) -> bool:
            return isinstance(op, Join | Met) and op.meeting == name

        yield Fault("dropped turn", f"{name}", _changed(protocol, takes_turn, lambda op: []))
        for warpgroup in sorted({process.warpgroup for process in protocol}):

            def takes_own(process: Process, op: Op, warpgroup: int = warpgroup) -> bool:
                return process.warpgroup == warpgroup and takes_turn(process, op)

            if _any(protocol, takes_own):
                yield Fault("dropped turn", f"{warpgroup} {name}", _changed(protocol, takes_own, lambda op: []))


def _at_arrivals(protocol: Protocol, arrives: Chosen, where: str, places: tuple[int, ...]) -> Iterator[Fault]:
    yield Fault("dropped arrive", where, _changed(protocol, arrives, lambda op: []))
    yield Fault("dropped arrive, once", where, _changed(protocol, arrives, lambda op: [], once=True))
    yield Fault("doubled arrive", where, _changed(protocol, arrives, lambda op: [op, op]))
    yield Fault("doubled arrive, once", where, _changed(protocol, arrives, lambda op: [op, op], once=True))
    yield Fault("missing stage", where, _changed(protocol, arrives, _without_stage(places)))
    if _any(protocol, lambda process, op: arrives(process, op) and isinstance(op, Arrive) and op.size > 0):
        yield Fault("wrong size", where, _changed(protocol, arrives, lambda op: [_larger(op)]))
        filled = _changed(protocol, lambda process, op: isinstance(op, Copy) and op.barrier in places, lambda op: [])
        yield Fault("dropped copy", where, filled)


def _rings(launches: Sequence[Protocol]) -> dict[int, tuple[int, ...]]:
    """Places of mbarriers that one instruction waits or arrives at, in any launch: each to all of its ring."""
    of_line: dict[int, set[int]] = {}
    for process in itertools.chain(*launches):
        for op, line in process.steps:
            if isinstance(op, Wait | Arrive):
                of_line.setdefault(line, set()).add(op.barrier[1])
    rings: dict[int, set[int]] = {}
    for places in of_line.values():
        joined = places.union(*(rings.get(place, set()) for place in places))
        rings.update(dict.fromkeys(joined, joined))
    return {place: tuple(sorted(ring)) for place, ring in rings.items()}


def _turns(protocol: Protocol) -> set[tuple[str, int, int]]:
    """Meetings of two warpgroups that not all threads join."""
    joined: dict[tuple[str, int, int], set[int]] = {}
    for process in protocol:
        for op, _ in process.steps:
            if isinstance(op, Join) and op.meeting[0] == "bar":
                joined.setdefault(op.meeting, set()).add(process.warpgroup)
    everybody = len({process.warpgroup for process in protocol})
    return {name for name, warpgroups in joined.items() if 1 < len(warpgroups) < everybody}


def _any(protocol: Protocol, chosen: Chosen) -> bool:
    return any(chosen(process, op) for process in protocol for op, _ in process.steps)


def _changed(protocol: Protocol, chosen: Chosen, rewrite: Callable[[Op], list[Op]], once: bool = False) -> Protocol:
    """With ``rewrite`` of each ``chosen`` operation in its place, or of each process's first one."""
    changed = []
    for process in protocol:
        steps: list[Step] = []
        left = 1 if once else len(process.steps)
        for step in process.steps:
            if left and chosen(process, step.op):
                steps += [Step(op, step.line) for op in rewrite(step.op)]
                left -= 1
            else:
                steps.append(step)
        changed.append(process._replace(steps=tuple(steps)))
    return tuple(changed)


def _early(process: Process) -> tuple[Step, ...]:
    """Arrivals right behind the start of the product before them."""
    steps: list[Step] = []
    behind = 0
    for step in process.steps:
        if isinstance(step.op, Arrive) and behind:
            steps.insert(behind, step)
        else:
            steps.append(step)
        if isinstance(step.op, Multiply):
            behind = len(steps)
    return tuple(steps)


def _without_stage(places: tuple[int, ...]) -> Callable[[Op], list[Op]]:
    """The ring's last place taken for its first."""

    def rewrite(op: Op) -> list[Op]:
        assert isinstance(op, Arrive | Wait)
        rank, place = op.barrier
        return [op._replace(barrier=(rank, places[0] if place == places[-1] else place))]

    return rewrite


def _counting(op: Op, more: int) -> Op:
    assert isinstance(op, Init)
    return op._replace(arrivals=op.arrivals + more)


def _other_parity(op: Op) -> Op:
    assert isinstance(op, Wait)
    return op._replace(parity=op.parity ^ 1)


def _larger(op: Op) -> Op:
    assert isinstance(op, Arrive)
    return op._replace(size=op.size + 16)
