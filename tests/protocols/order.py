"""All interleavings of a protocol at once: what is before what in every one of them.

One interleaving is run. Each operation knows its past, the operations that every interleaving does before it: those of
its own program, and those that it waited for. Wherever another order of two operations would change what one of them
does, the run demands that one is in the past of the other:

- a phase of an mbarrier completes after all that waited for the phase before went on: nobody misses a phase;
- who waits for a phase knows that the one before is complete: the parity cannot be that of two phases earlier;
- who arrives, or signals, knows that the phase before is complete: it is counted in no other;
- who joins a meeting knows that the one before took place, and joins each once;
- a copy begins after all reads of its place have ended, and all reads begin after it has landed.

If none of these is violated, every interleaving has the same past for every operation, so that the one that was run
stands for all of them: executions without a race have one Mazurkiewicz trace (Flanagan and Godefroid, "Dynamic
partial-order reduction for model checking software", POPL 2005, section 2). ``test_search.py`` holds that against a
plain search of all interleavings.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

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
    Wait,
)

WARPGROUP = 128

Past = int
"""A set of events, by their bits."""


@dataclass
class _Mbarrier:
    """Attributes:
    initialized: the event.
    missing, expected: arrivals and bytes that the phase still waits for.
    past: of the phase so far.
    completions: of each complete phase, the event.
    known: what who waited for the last complete phase knows.
    waited: events of waits for the last complete phase.
    """

    initialized: Past
    count: int
    missing: int
    expected: int = 0
    past: Past = 0
    completions: list[Past] = field(default_factory=list)
    known: Past = 0
    waited: Past = 0


@dataclass
class _Meeting:
    """The next meeting, and the pasts and events of those that took place."""

    joined: int = 0
    past: Past = 0
    present: set[str] = field(default_factory=set)
    known: list[Past] = field(default_factory=list)
    events: list[Past] = field(default_factory=list)


@dataclass
class _Product:
    """A product: its event, which is its end; threads that started it, and what they knew."""

    end: Past
    started: int = 0
    past: Past = 0


@dataclass
class _Access:
    """Of shared memory: ``event`` ends it; ``read`` is whether a fill was read."""

    place: Place
    event: Past
    read: bool = False


@dataclass
class Outcome:
    """Attributes:
    faults: what can go wrong in some interleaving; after the first one, others may follow from it.
    left: meetings that some threads joined and that did not take place: name to threads.
    phases: of each mbarrier, how many completed.
    """

    faults: list[str]
    left: dict[tuple[str, int, int], int]
    phases: dict[Barrier, int]


class _Run:
    def __init__(self, protocol: Protocol) -> None:
        self.processes = protocol
        self.pasts: list[Past] = [0] * len(protocol)
        self.events = 0
        self.faults: list[str] = []
        self.mbarriers: dict[Barrier, _Mbarrier] = {}
        self.meetings: dict[tuple[str, int, int], _Meeting] = defaultdict(_Meeting)
        self.awaited: dict[tuple[str, tuple[str, int, int]], int] = {}
        self.products: dict[tuple[tuple[int, int], int], _Product] = {}
        self.fills: dict[int, list[_Access]] = defaultdict(list)
        self.reads: dict[int, list[_Access]] = defaultdict(list)
        self.from_outside: dict[int, Past] = defaultdict(int)

    def new_event(self) -> Past:
        self.events += 1
        return 1 << self.events - 1

    def run(self) -> Outcome:
        done = [0] * len(self.processes)
        moved = True
        while moved and not self.faults:
            moved = False
            for index, process in enumerate(self.processes):
                while done[index] < len(process.steps) and self.does(index, process, process.steps[done[index]].op):
                    done[index] += 1
                    moved = True
        waiting = [
            f"{process.name} for {process.steps[step].op}"
            for process, step in zip(self.processes, done)
            if step < len(process.steps)
        ]
        if waiting and not self.faults:
            self.faults.append(f"deadlock: {'; '.join(waiting)}")
        if not self.faults:
            self.check_exits()
        left = {name: meeting.joined for name, meeting in self.meetings.items() if meeting.joined}
        return Outcome(self.faults, left, {name: len(each.completions) for name, each in self.mbarriers.items()})

    def does(self, index: int, process: Process, op: Op) -> bool:
        """Do it, unless it has to wait."""
        match op:
            case Join(meeting, size):
                self.joins(index, process, meeting, size)
            case Met(meeting):
                known, awaited = self.meetings[meeting].known, self.awaited[process.name, meeting]
                if len(known) <= awaited:
                    return False
                self.pasts[index] |= known[awaited]
            case Init(barrier, count):
                self.mbarriers[barrier] = _Mbarrier(self.event_of(index), count, count)
            case Arrive(barrier, size):
                self.signal(process.name, barrier, self.pasts[index], process.threads, size)
                if barrier[0] != process.rank:
                    self.from_outside[barrier[0]] |= self.event_of(index)
            case Wait(barrier, parity):
                return self.waits(index, process, barrier, parity)
            case Copy(places, offset):
                for place in places:
                    self.copies(index, process, place, (place.rank, offset))
            case Read(place):
                self.see(process, place, self.pasts[index])
                self.reads[place.rank].append(_Access(place, self.event_of(index)))
            case Multiply(group, number, places):
                self.multiplies(index, process, group, number, places)
            case Multiplied(group, number):
                return self.multiplied(index, group, number)
        return True

    def event_of(self, index: int) -> Past:
        event = self.new_event()
        self.pasts[index] |= event
        return event

    def fault(self, who: str, what: str) -> None:
        self.faults.append(f"{who} {what}")

    # --- mbarriers

    def mbarrier(self, who: str, name: Barrier, past: Past) -> _Mbarrier:
        found = self.mbarriers.get(name)
        if found is None or not past & found.initialized:
            self.fault(who, f"may use mbarrier {name} before it is initialized")
            return found or _Mbarrier(0, 1, 1)
        return found

    def signal(self, who: str, name: Barrier, past: Past, arrivals: int, size: int) -> None:
        barrier = self.mbarrier(who, name, past)
        if barrier.completions and not past & barrier.completions[-1]:
            self.fault(who, f"may signal mbarrier {name} in an earlier phase than {len(barrier.completions)}")
        barrier.missing -= arrivals
        barrier.expected += size
        barrier.past |= past
        if barrier.missing < 0:
            self.fault(who, f"arrives at mbarrier {name} more often than its count of {barrier.count}")
        if barrier.missing or barrier.expected:
            return
        if barrier.waited & ~barrier.past:
            self.fault(who, f"completes phase {len(barrier.completions)} of mbarrier {name}: the one before is missed")
        event = self.new_event()
        barrier.completions.append(event)
        barrier.known = barrier.past | event
        barrier.missing, barrier.past, barrier.waited = barrier.count, 0, 0

    def waits(self, index: int, process: Process, name: Barrier, parity: int) -> bool:
        barrier = self.mbarrier(process.name, name, self.pasts[index])
        phase = len(barrier.completions) - 1
        if phase & 1 != parity:
            return False
        if phase > 0 and not self.pasts[index] & barrier.completions[-2]:
            self.fault(process.name, f"may take phase {phase - 2} of mbarrier {name} for {phase}")
        self.pasts[index] |= barrier.known
        barrier.waited |= self.event_of(index)
        return True

    # --- Shared memory

    def copies(self, index: int, process: Process, place: Place, barrier: Barrier) -> None:
        past = self.pasts[index]
        for read in self.reads[place.rank]:
            if place.overlaps(read.place) and not past & read.event:
                self.fault(process.name, f"copies to {place} while {read.place} may still be read")
        for fill in self.fills[place.rank]:
            if place.overlaps(fill.place):
                if not past & fill.event:
                    self.fault(process.name, f"copies to {place} while {fill.place} may still be filled")
                if not fill.read:
                    self.fault(process.name, f"copies to {place}, which was filled and not read")
        landed = self.new_event()
        self.fills[place.rank] = [fill for fill in self.fills[place.rank] if not place.overlaps(fill.place)]
        self.reads[place.rank] = [read for read in self.reads[place.rank] if not place.overlaps(read.place)]
        self.fills[place.rank].append(_Access(place, landed))
        self.from_outside[place.rank] |= landed
        self.signal(f"a copy of {process.name}", barrier, past | landed, 0, place.start - place.end)

    def see(self, process: Process, place: Place, past: Past) -> None:
        filled = [fill for fill in self.fills[place.rank] if fill.place.overlaps(place)]
        if not filled:
            self.fault(process.name, f"reads {place}, which nobody filled")
        for fill in filled:
            fill.read = True
            if not past & fill.event:
                self.fault(process.name, f"may read {place} before it is full")

    def multiplies(
        self, index: int, process: Process, group: tuple[int, int], number: int, places: tuple[Place, ...]
    ) -> None:
        for place in places:
            self.see(process, place, self.pasts[index])
        product = self.products.get((group, number))
        if product is None:
            product = self.products[group, number] = _Product(self.new_event())
            for place in places:
                self.reads[place.rank].append(_Access(place, product.end))
        product.started += process.threads
        product.past |= self.pasts[index]

    def multiplied(self, index: int, group: tuple[int, int], number: int) -> bool:
        products = [self.products.get((group, each)) for each in range(number)]
        if any(product is None or product.started < WARPGROUP for product in products):
            return False
        for product in products:
            assert product is not None
            self.pasts[index] |= product.past | product.end
        return True

    # --- Meetings, and the end

    def joins(self, index: int, process: Process, name: tuple[str, int, int], size: int) -> None:
        meeting, past = self.meetings[name], self.pasts[index]
        if meeting.events and not past & meeting.events[-1]:
            self.fault(process.name, f"may join {name} in an earlier meeting than {len(meeting.events)}")
        if process.name in meeting.present:
            self.fault(process.name, f"joins meeting {len(meeting.events)} of {name} twice")
        meeting.joined += process.threads
        meeting.past |= past
        meeting.present.add(process.name)
        self.awaited[process.name, name] = len(meeting.events)
        if meeting.joined > size:
            self.fault(process.name, f"joins {name}, which has {size} threads already")
        if meeting.joined == size:
            event = self.new_event()
            meeting.events.append(event)
            meeting.known.append(meeting.past | event)
            meeting.joined, meeting.past, meeting.present = 0, 0, set()

    def check_exits(self) -> None:
        """Shared memory ends with the last thread of its block."""
        for rank, events in self.from_outside.items():
            past = 0
            for process, known in zip(self.processes, self.pasts):
                past |= known if process.rank == rank else 0
            if events & ~past:
                self.faults.append(f"block {rank} may exit before all copies to it, and arrivals at it, are done")


def every_interleaving(protocol: Protocol) -> Outcome:
    """What any interleaving of ``protocol`` can do wrong."""
    return _Run(protocol).run()
