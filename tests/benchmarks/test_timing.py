"""What the benchmarks count, compare and time, by clocks that the tests drive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import operations
from benchmarks.contenders.operations import Call
from benchmarks.measuring import check, timing
from benchmarks.measuring.timing import Contender, CudaClock, HostClock, Times, measure

# --- What is computed -------------------------------------------------------------------------------------------------


def outcome_bytes(name: str, shape: tuple[int, int]) -> int:
    (operation,) = (each for each in operations.casts(torch.float8_e4m3fn) if each.name == name)
    return Call(operation, torch.randn(shape).bfloat16()).bytes()


def test_bytes_that_must_move() -> None:
    # x and scale are read, codes and scale_inv written
    assert outcome_bytes("cast", (128, 256)) == 128 * 256 * 2 + 4 + 128 * 256 + 4
    # ... and amax is both; the second copy has the same scale
    assert outcome_bytes("cast + transposed + amax", (128, 256)) == 128 * 256 * 2 + 4 + 4 + 2 * 128 * 256 + 4 + 4
    assert outcome_bytes("transposed only", (128, 256)) == 128 * 256 * 2 + 4 + 128 * 256 + 4
    assert outcome_bytes("current scaling", (128, 256)) == 128 * 256 * 2 + 128 * 256 + 4
    # ragged: 200 columns are seven blocks of 32 or two of 128; 100 rows are four or one
    assert outcome_bytes("1x32 + transposed", (100, 200)) == 100 * 200 * (2 + 1 + 1) + 100 * 7 + 200 * 4
    assert outcome_bytes("1x128 + transposed", (100, 200)) == 100 * 200 * (2 + 1 + 1) + 4 * (100 * 2 + 200 * 1)
    assert outcome_bytes("128x128", (100, 200)) == 100 * 200 * (2 + 1) + 4 * 1 * 2
    # amax, amax_history, scale and fp8_max are read; all but the last are written
    update = Call(operations.update_scales({}), torch.randn(8, 10))
    assert update.bytes() == 4 * (10 + 80 + 10 + 10) + 4 * (10 + 80 + 10)


def test_a_call_repeats_its_first_one() -> None:
    update = Call(operations.update_scales({}), torch.randn(8, 10))
    first = [tensor.clone() for tensor in update.outcome()]
    assert all(map(torch.equal, first, update.outcome()))
    update()  # now amax is 0, and nothing is left to do
    assert all(map(torch.equal, first, update.outcome()))


def test_results_are_compared_to_the_bit_over_and_over() -> None:
    few = torch.randn(4, 6).to(torch.float8_e4m3fn)
    whole = few.view(torch.uint8).repeat(3, 1)
    assert check.same(whole.view(few.dtype), few)
    assert check.same(whole.t().contiguous().t().view(few.dtype), few)
    whole[11, 5] ^= 0x80
    assert not check.same(whole.view(few.dtype), few)
    assert not check.same(few.to(torch.float8_e5m2), few)
    assert not check.same(few[:3], few)
    assert check.same(torch.tensor(1.5), torch.tensor(1.5))
    assert not check.same(torch.tensor(0.0), torch.tensor(-0.0))
    assert check.same(torch.empty(0), torch.empty(0))


def test_results_may_be_close_where_rounding_differs() -> None:
    few = torch.arange(1.0, 21.0).reshape(4, 5)
    whole = few.repeat(5, 1)
    whole[0, 0] *= 1 + 2**-20
    assert not check.same(whole, few)
    assert check.close(whole, few, share=1.0)
    whole[0, 0] *= 1.1
    assert not check.close(whole, few, share=1.0)
    assert check.close(whole, few, share=0.99)
    assert not check.close(whole * torch.nan, few, share=0.01)
    one, next_code = (torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn) for code in (0x38, 0x39))
    assert not check.close(one, next_code, share=0.1)
    assert check.close(torch.empty(0), torch.empty(0), share=1.0)


def test_results_are_checked_in_memory_that_held_nan() -> None:
    buffer = torch.empty(8, dtype=torch.float8_e4m3fn)

    def fills_half() -> list[Tensor]:
        buffer[:4] = 1.0
        return [buffer]

    buffer.fill_(1.0)  # left by an earlier call
    assert fills_half()[0].float().eq(1.0).all()
    (result,) = check.poisoned(fills_half)
    assert result[:4].float().eq(1.0).all()
    assert result[4:].float().isnan().all()


# --- Timing -----------------------------------------------------------------------------------------------------------


class ScriptedClock:
    """Takes its seconds from a table, a row for each round, and runs the contenders."""

    def __init__(self, rounds: Sequence[Sequence[float]]) -> None:
        self.rounds = iter(rounds)

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        for contender in contenders:
            contender.prepare()
            contender.call()
        return list(next(self.rounds))


def test_median_and_quartiles() -> None:
    assert Times.of([4.0, 1.0, 3.0, 2.0, 100.0]) == Times(median=3.0, low=2.0, high=4.0, count=5)
    assert Times(8.0, 4.0, 12.0, 7) / 4 == Times(2.0, 1.0, 3.0, 7)


class ClockByName:
    """Each contender takes what it says; a round is that many times longer than the one before."""

    def __init__(self, growth: float) -> None:
        self.growth, self.rounds = growth, 0
        self.order: list[float] = []

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        self.rounds += 1
        times = [contender.call() for contender in contenders]
        self.order += times  # type: ignore[arg-type]
        return [time * self.growth**self.rounds for time in times]  # type: ignore[operator]


def contenders_taking(*seconds: float) -> list[Contender]:
    return [Contender(lambda time=time: time) for time in seconds]


def test_the_first_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 3)
    assert measure(ClockByName(10), contenders_taking(1, 5), seconds=0) == [
        Times(10**4, 5.5 * 10**3, 5.5 * 10**4, 3),
        Times(5 * 10**4, 27.5 * 10**3, 27.5 * 10**4, 3),
    ]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_contender_follows_each_other_one_equally_often(count: int) -> None:
    rounds = timing.orders(count)
    assert all(sorted(each) == [*range(count)] for each in rounds)
    follows = Counter(pair for each in rounds for pair in zip(each, each[1:]))
    assert len(follows) == count * (count - 1)
    assert len({*follows.values()}) <= 1
    places = Counter((place, index) for each in rounds for place, index in enumerate(each))
    assert len({*places.values()}) == 1


def test_times_are_those_of_their_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    for rounds in (3, 20):
        monkeypatch.setattr(timing, "LEAST_ROUNDS", rounds)
        clock = ClockByName(1)
        assert [each.median for each in measure(clock, contenders_taking(1, 2, 3, 4, 5), seconds=0)] == [1, 2, 3, 4, 5]
        counted = [clock.order[start : start + 5] for start in range(0, len(clock.order), 5)][timing.WARM_UP_ROUNDS :]
        assert len({tuple(each) for each in counted}) == min(rounds, 10)
    assert measure(ClockByName(1), [], seconds=0) == []


def test_rounds_fill_the_seconds_of_all_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 0)
    ticks = iter(range(1000))
    clock = ScriptedClock([(1, 1)] * 1000)
    first, _ = measure(clock, [Contender(lambda: None)] * 2, seconds=10, now=lambda: next(ticks))
    assert first.count == 20 + timing.LEAST_ROUNDS - 1  # the least rounds do not ask for the time
    monkeypatch.setattr(timing, "MOST_ROUNDS", 7)
    first, _ = measure(clock, [Contender(lambda: None)] * 2, seconds=1e9)
    assert first.count == 7


def test_preparation_is_outside_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> Callable[[], None]:
        def wait() -> None:
            nonlocal now
            now += seconds

        return wait

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    contenders = [Contender(pass_time(2.0), prepare=pass_time(100.0)), Contender(pass_time(3.0))]
    assert HostClock().round(contenders) == [2.0, 3.0]
    (times,) = timing.measure_on_host([pass_time(0.5)], 0.0, torch.device("cpu"))
    assert times.median == 0.5


def test_the_device_is_timed_between_events_behind_a_cold_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    real_sum = torch.sum
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch, "sum", lambda *args, **named: (log.append("flush"), real_sum(*args, **named)))
    clock = CudaClock(torch.device("cpu"))
    assert clock.round([Contender(lambda: log.append("call"), lambda: log.append("prepare"))] * 2) == [0.25, 0.25]
    assert log == ["prepare", "flush", "event", "call", "event"] * 2 + ["wait"]
