"""Timing: rounds of alternating contenders, medians and quartiles.

A *clock* runs one round and returns each contender's time; :func:`measure` runs rounds. Contenders of a measurement are
compared with each other, and alternate, so that a slowdown of the machine affects all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UP_ROUNDS = 2
LEAST_ROUNDS = 3
MOST_ROUNDS = 1000
BURST = 50
"""Calls per reading of the host's clock: enough for its resolution, and fewer than the driver queues."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """What is timed: ``call``. ``prepare`` runs before each call and is not timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] = _nothing


@dataclass(frozen=True)
class Times:
    """Seconds per call: median, lower and upper quartile of ``count`` measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))

    def __truediv__(self, divisor: float) -> Times:
        """In another unit, or per call for ``divisor`` calls that were measured together."""
        return Times(self.median / divisor, self.low / divisor, self.high / divisor, self.count)


class Clock(Protocol):
    def round(self, contenders: Sequence[Contender]) -> list[float]:
        """Run each contender once, in turn, and return the seconds each took."""


class HostClock:
    """Measures host time."""

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        seconds = []
        for contender in contenders:
            contender.prepare()
            start = time.perf_counter()
            contender.call()
            seconds.append(time.perf_counter() - start)
        return seconds


class CudaClock:
    """Measures device time between two events, with none of the contender's data in L2.

    Before each contender, a buffer of 16 times L2's size is read. It is read rather than written, because write-backs
    would take bandwidth from the contender. Reading it also takes long enough for the host to enqueue the contender, so
    that waiting for the host is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._cold = torch.ones(16 * l2_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        spans = []
        for contender in contenders:
            contender.prepare()
            torch.sum(self._cold, dim=0, out=self._sum)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            contender.call()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self._cold.device)
        return [start.elapsed_time(end) / 1e3 for start, end in spans]


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def orders(count: int) -> list[list[int]]:
    """Orders of ``count`` contenders: together, each is in each place, and follows each other one, equally often.

    This does not count the first contender of an order, which follows the last one of the order before.

    A balanced design: E. J. Williams, Experimental designs balanced for the estimation of residual effects of
    treatments, Australian Journal of Scientific Research A 2 (1949).
    """
    first = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    found = [[(index + shift) % count for index in first] for shift in range(count)]
    return found + [order[::-1] for order in found] * (count % 2) or [[]]


def measure(
    clock: Clock, contenders: Sequence[Contender], seconds: float, now: Callable[[], float] = time.perf_counter
) -> list[Times]:
    """Times of each contender, in rounds for about ``seconds`` per contender, after some warm-up rounds.

    The order of a round follows :func:`orders`: a GPU whose clock depends on its power is slower after a contender
    that takes more of it.
    """
    rounds: list[list[float]] = []
    in_turn = orders(len(contenders))
    if seconds:
        gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP_ROUNDS):
            clock.round(contenders)
        end = now() + seconds * len(contenders)
        while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and now() < end):
            order = in_turn[len(rounds) % len(in_turn)]
            times = dict(zip(order, clock.round([contenders[index] for index in order])))
            rounds.append([times[index] for index in range(len(contenders))])
    finally:
        gc.enable()
    return [Times.of(of_one) for of_one in zip(*rounds)]


def measure_on_host(calls: Sequence[Callable[[], object]], seconds: float, device: torch.device) -> list[Times]:
    """Host time per call, without the device's work: it is not waited for, and its queue does not fill up."""
    in_a_row = BURST if seconds else 1

    def burst(call: Callable[[], object]) -> Contender:
        def call_in_a_row() -> None:
            for _ in range(in_a_row):
                call()

        return Contender(call_in_a_row, prepare=torch.cuda.synchronize if device.type == "cuda" else _nothing)

    return [times / in_a_row for times in measure(HostClock(), [burst(call) for call in calls], seconds)]
