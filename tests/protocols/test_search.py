"""What :mod:`.order` says of all interleavings at once is what a plain search of them finds.

Protocols here are small, written by hand: CUTLASS's pipeline (``PipelineTmaAsync``) with one producer, with and without
turns, and broken ones, among them those that others reported.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocols.faults import planted
from tests.protocols.order import every_interleaving
from tests.protocols.protocol import (
    Arrive,
    Barrier,
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
from tests.protocols.search import Search

BYTES = 16
ALL, TURN = ("bar", 0, 0), "bar"
PRODUCER = 9


def full(stage: int) -> Barrier:
    return 0, 1000 + 8 * stage


def empty(stage: int) -> Barrier:
    return 0, 2000 + 8 * stage


def place(stage: int) -> Place:
    return Place(0, BYTES * stage, BYTES * (stage + 1))


def pipeline(
    stages: int,
    consumers: int,
    tiles: int,
    *,
    count: int | None = None,
    producer_parity: int = 1,
    wgmma: bool = False,
    turns: bool = False,
) -> Protocol:
    """A producer fills stages, all consumers read each.

    Args:
        count: of an ``empty`` barrier's arrivals; None is the right one, all threads of the consumers.
        producer_parity: what the producer waits for first.
        wgmma: whether consumers read by products, and wait for each before they release its stage.
        turns: whether two consumers read in turns.
    """
    threads = 128 if wgmma else 1
    everybody = 1 + threads * consumers
    start: list[Op] = [Join(ALL, everybody), Met(ALL)]

    def producer() -> Iterator[Op]:
        for stage in range(stages):
            yield Init(full(stage), 1)
            yield Init(empty(stage), threads * consumers if count is None else threads * count)
        yield from start
        for tile in range(tiles):
            stage, turn = tile % stages, tile // stages
            yield Wait(empty(stage), (turn & 1) ^ producer_parity)
            yield Arrive(full(stage), BYTES)
            yield Copy((place(stage),), full(stage)[1])

    def consumer(own: int) -> Iterator[Op]:
        yield from start
        if turns and own == 1:
            yield Join((TURN, 0, 1), 2 * threads)
        for tile in range(tiles):
            stage, turn = tile % stages, tile // stages
            yield Wait(full(stage), turn & 1)
            if turns:
                yield from (Join((TURN, 0, 1 + own), 2 * threads), Met((TURN, 0, 1 + own)))
            if wgmma:
                yield from (Multiply((0, own), tile, (place(stage),)), Multiplied((0, own), tile + 1))
            else:
                yield Read(place(stage))
            if turns:
                yield Join((TURN, 0, 2 - own), 2 * threads)
            yield Arrive(empty(stage))

    programs = [(PRODUCER, 1, producer()), *((own, threads, consumer(own)) for own in range(consumers))]
    return tuple(
        Process(f"process {number}", 0, number, size, tuple(Step(op, _line(number, op)) for op in ops))
        for number, size, ops in programs
    )


def _line(number: int, op: Op) -> int:
    """Of the source: a process has one statement of each kind."""
    return 10 * number + [Init, Arrive, Wait, Copy, Read, Multiply, Multiplied, Join, Met].index(type(op))


SMALL = {
    "one stage": pipeline(1, 1, 3),
    "two stages": pipeline(2, 1, 5),
    "two consumers of one stage": pipeline(1, 2, 3),
    "two consumers": pipeline(2, 2, 5),
    "three stages": pipeline(3, 2, 4),
    "products": pipeline(2, 2, 3, wgmma=True),
    "turns": pipeline(2, 2, 4, turns=True),
    "products in turns": pipeline(1, 2, 3, turns=True, wgmma=True),
}


@pytest.mark.parametrize("protocol", SMALL.values(), ids=SMALL)
def test_both_find_the_same(protocol: Protocol) -> None:
    """No fault in the protocol, and one wherever one is planted that does damage in any interleaving."""
    assert not every_interleaving(protocol).faults
    assert not Search(protocol).faults
    faults = list(planted(protocol))
    by_order, by_search = (
        {(fault.kind, fault.where) for fault in faults if check(fault.protocol)}
        for check in (lambda each: every_interleaving(each).faults, lambda each: Search(each).faults)
    )
    assert len(by_search) > len(faults) // 2
    assert by_order == by_search


def test_a_count_that_is_not_that_of_the_arrivals() -> None:
    """NVIDIA/cutlass issue 2404: two warpgroups consume. With a consumer group of one, a stage is not waited for by all
    that read it, and with more than arrive, the producer hangs."""
    for check in (lambda protocol: every_interleaving(protocol).faults, lambda protocol: Search(protocol).faults):
        assert not check(pipeline(2, 2, 5))
        assert check(pipeline(2, 2, 5, count=1))
        assert any("deadlock" in fault for fault in check(pipeline(2, 2, 5, count=3)))


def test_a_producer_that_starts_with_the_consumers_phase() -> None:
    """CUTLASS's ``make_producer_start_state`` flips it: stages are empty at first, and the producer must not wait."""
    (fault,) = every_interleaving(pipeline(2, 1, 3, producer_parity=0)).faults
    assert "deadlock" in fault
    assert Search(pipeline(2, 1, 3, producer_parity=0)).faults == {"deadlock"}


def test_a_parity_tells_only_adjacent_phases_apart() -> None:
    """PTX ISA, ``mbarrier.test_wait``: a phase is the current one or the one before, by its parity. Who comes late by
    one finds the wait not over, and who comes early by one finds that of two phases ago."""
    barrier = (0, 8)
    arrive, late = Arrive(barrier), Wait(barrier, 0)
    start: list[Op] = [Join(ALL, 2), Met(ALL)]

    def two(first: list[Op], second: list[Op]) -> Protocol:
        programs = [[Init(barrier, 1), *start, *first], [*start, *second]]
        return tuple(Process(f"process {i}", 0, i, 1, tuple(map(Step, program))) for i, program in enumerate(programs))

    right = two([arrive], [late])
    missed = two([arrive, arrive], [late])
    early = two([arrive, arrive], [Wait(barrier, 1)])
    assert not every_interleaving(right).faults
    assert not Search(right).faults
    for wrong in (missed, early):
        assert every_interleaving(wrong).faults
        assert Search(wrong).faults


def test_the_search_is_of_more_than_one_order() -> None:
    """The number of states of two processes that never meet is the product of theirs."""
    steps = tuple(Step(Arrive((0, place))) for place in (0, 8))
    apart = tuple(
        Process(f"process {i}", 0, i, 1, (Step(Init((0, 8 * i), 100)), *(Step(Arrive((0, 8 * i))) for _ in steps)))
        for i in range(2)
    )
    assert Search(apart).states == 4 * 4
