"""A plain search of every interleaving, without a shortcut: what :mod:`.order` is held against, on small protocols.

States are kept, so that each is searched once. Copies land, and products end, at any time after they started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.protocols.protocol import (
    Arrive,
    Barrier,
    Copy,
    Init,
    Join,
    Met,
    Multiplied,
    Multiply,
    Place,
    Protocol,
    Read,
    Wait,
)

Id = tuple[int, int]
"""A step: its process and its number there."""


class _State(NamedTuple):
    """Attributes:
    done: steps of each process.
    mbarriers: phase, missing arrivals and missing bytes.
    in_flight: copies: step, place, mbarrier.
    contents: which copy filled a place last, and whether that was read.
    products: group and number, threads that started it; -1 when it has ended.
    meetings: those that took place, and who joined the next.
    """

    done: tuple[int, ...]
    mbarriers: tuple[tuple[Barrier, tuple[int, int, int]], ...]
    in_flight: frozenset[tuple[Id, Place, Barrier]] = frozenset()
    contents: tuple[tuple[Place, tuple[Id, bool]], ...] = ()
    products: tuple[tuple[tuple[Any, int], tuple[int, frozenset[Place]]], ...] = ()
    meetings: tuple[tuple[tuple[str, int, int], tuple[int, frozenset[int]]], ...] = ()
    joined: tuple[tuple[Any, int], ...] = ()


class _Wrong(Exception):
    """An operation does damage."""


def _with(pairs: tuple[tuple[Any, Any], ...], key: Any, value: Any) -> tuple[tuple[Any, Any], ...]:
    return tuple(sorted(({**dict(pairs), key: value}).items(), key=repr))


class Search:
    """Attributes:
    faults: what some interleaving does wrong, and what not all do alike.
    states: how many there are.
    """

    def __init__(self, protocol: Protocol, most_states: int = 300_000) -> None:
        self.protocol = protocol
        self.counts = {op.barrier: op.arrivals for each in protocol for op, _ in each.steps if isinstance(op, Init)}
        self.seen: dict[Any, set[Any]] = defaultdict(set)
        self.faults: set[str] = set()
        start = _State((0,) * len(protocol), tuple((name, (0, count, 0)) for name, count in self.counts.items()))
        known, todo = {start}, [start]
        while todo and not self.faults:
            state = todo.pop()
            try:
                following = list(self.following(state))
            except _Wrong as error:
                self.faults.add(str(error))
                break
            if not following and any(n < len(each.steps) for n, each in zip(state.done, protocol)):
                self.faults.add("deadlock")
            new = [each for each in following if each not in known]
            known.update(new)
            todo += new
            assert len(known) < most_states, "too many states for a plain search"
        self.states = len(known)
        self.faults |= {
            f"{what} depends on the order: {values}" for what, values in self.seen.items() if len(values) > 1
        }

    def following(self, state: _State) -> Iterator[_State]:
        for index, (process, done) in enumerate(zip(self.protocol, state.done)):
            if done < len(process.steps):
                after = self.does(state, index, process.steps[done].op)
                if after is not None:
                    yield after._replace(done=(*state.done[:index], done + 1, *state.done[index + 1 :]))
        for landing in state.in_flight:
            step, place, barrier = landing
            landed = state._replace(in_flight=state.in_flight - {landing})
            yield self.signalled(landed, barrier, 0, place.start - place.end, ("lands", step, place))
        for key, (started, places) in state.products:
            if started == 128:
                yield state._replace(products=_with(state.products, key, (-1, places)))

    def does(self, state: _State, index: int, op: Any) -> _State | None:
        """The state after, or None if it has to wait."""
        process, step = self.protocol[index], (index, state.done[index])
        match op:
            case Init():
                return state
            case Arrive(barrier, size):
                return self.signalled(state, barrier, process.threads, size, step)
            case Wait(barrier, parity):
                phase, _, _ = dict(state.mbarriers)[barrier]
                if (phase - 1) & 1 != parity:
                    return None
                self.seen["wait", step].add(phase)
                return state
            case Copy(places, offset):
                for place in places:
                    state = self.copied(state, step, place, (place.rank, offset))
                return state
            case Read(place):
                return self.read(state, step, (place,))
            case Multiply(group, number, places):
                state = self.read(state, step, places)
                started, _ = dict(state.products).get((group, number), (0, frozenset()))
                started += process.threads
                return state._replace(products=_with(state.products, (group, number), (started, frozenset(places))))
            case Multiplied(group, number):
                products = dict(state.products)
                return state if all(products.get((group, n), (0,))[0] == -1 for n in range(number)) else None
            case Join(meeting, size):
                return self.joins(state, index, step, meeting, size)
            case Met(meeting):
                return state if dict(state.meetings)[meeting][0] > dict(state.joined)[index, meeting] else None
        raise AssertionError(op)

    def signalled(self, state: _State, name: Barrier, arrivals: int, size: int, step: Any) -> _State:
        phase, missing, expected = dict(state.mbarriers)[name]
        self.seen["signal", step].add(phase)
        missing, expected = missing - arrivals, expected + size
        if missing < 0:
            raise _Wrong("more arrivals than an mbarrier's count")
        if not missing and not expected:
            phase, missing = phase + 1, self.counts[name]
        return state._replace(mbarriers=_with(state.mbarriers, name, (phase, missing, expected)))

    def copied(self, state: _State, step: Id, place: Place, barrier: Barrier) -> _State:
        if any(place.overlaps(other) for _, other, _ in state.in_flight):
            raise _Wrong("two copies at once to one place")
        if any(started != -1 and any(place.overlaps(each) for each in read) for _, (started, read) in state.products):
            raise _Wrong("a copy to what a product reads")
        if not dict(state.contents).get(place, (step, True))[1]:
            raise _Wrong("a copy to what was not read")
        contents = _with(state.contents, place, (step, False))
        return state._replace(in_flight=state.in_flight | {(step, place, barrier)}, contents=contents)

    def read(self, state: _State, step: Id, places: tuple[Place, ...]) -> _State:
        for place in places:
            filled = dict(state.contents).get(place)
            if filled is None or any(place.overlaps(other) for _, other, _ in state.in_flight):
                raise _Wrong("a read of what is not full")
            self.seen["read", step].add(filled[0])
            state = state._replace(contents=_with(state.contents, place, (filled[0], True)))
        return state

    def joins(self, state: _State, index: int, step: Id, name: tuple[str, int, int], size: int) -> _State:
        held, present = dict(state.meetings).get(name, (0, frozenset()))
        self.seen["join", step].add(held)
        if index in present:
            raise _Wrong("a thread joins a meeting twice")
        present |= {index}
        joined = _with(state.joined, (index, name), held)
        threads = sum(self.protocol[each].threads for each in present)
        if threads > size:
            raise _Wrong("more threads than a meeting has")
        meeting = (held + 1, frozenset()) if threads == size else (held, present)
        return state._replace(meetings=_with(state.meetings, name, meeting), joined=joined)
