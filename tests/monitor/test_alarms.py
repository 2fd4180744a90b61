"""What is an alarm, by figures written by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lightning_fp8.monitor.alarms import Alarm, Alarms, skip_of
from lightning_fp8.monitor.record import INDEX, Array, Interval, empty_values
from lightning_fp8.numerics.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from lightning_fp8.numerics.scaled import LINEAR_ROLES

NAMES = [f"{layer}.{role.value}" for layer in ("a", "b") for role in LINEAR_ROLES]
ROLES = [*LINEAR_ROLES, *LINEAR_ROLES]
HEALTHY = {
    "updates": 50, "head_room": 1.0, "amax": 2.0, "scale": 224.0, "window": 2.0,
    "elements": 1000, "signal": 1000.0, "noise": 1.0, "casts": 1,
}  # fmt: skip
"""30 dB; of gradients the scale is 28672."""


def interval(number: int, **changed: dict[int, float]) -> Interval:
    """The n-th interval of 50 steps; ``changed`` are figures by cast."""
    values = empty_values(len(NAMES))
    for name, value in HEALTHY.items():
        values[:, INDEX[name]] = value
    values[2::3, INDEX["scale"]] = 28672.0
    for name, of_casts in changed.items():
        for cast, value in of_casts.items():
            values[cast, INDEX[name]] = value
    return Interval(50 * number + 1, 50 * number + 50, 1.0, values)


def bits(**steps: float) -> Array:
    """No clipping but, of the first cast, ``s<row>=bits``."""
    found = np.zeros((50, len(NAMES)))
    for row, value in steps.items():
        found[int(row[1:]), 0] = value
    return found


def seen(*intervals: Interval, recipe: Recipe | None = None, of: Any = None) -> list[Alarm]:
    alarms = Alarms(NAMES, ROLES, recipe or DelayedScaling())
    for each in intervals:
        alarms.see(each, bits() if of is None else of, warm_up=50)
    return alarms.found


def test_a_healthy_run_has_none() -> None:
    assert seen(*(interval(number) for number in range(6))) == []
    assert seen(*(interval(number) for number in range(6)), recipe=Float8CurrentScaling()) == []


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("clips", {"clipped_steps": {4: 11}, "clipped_bits": {4: 0.6}}),
        ("flushes", {"flushed": {4: 31}}),
        ("stale scale", {"flushed": {4: 31}, "window": {4: 33.0}}),
        ("standing scale", {"updates": {4: 0}, "amax": {4: math.nan}}),
        ("standing scale", {"off_bits": {4: 1.1}}),
        ("inexact", {"noise": {4: 10.1}}),
    ],
)
def test_what_lasts_is_an_alarm_of_a_layer(rule: str, changed: dict[str, Any]) -> None:
    ill = [interval(number, **changed) for number in (1, 2, 3)]
    assert seen(ill[0]) == []
    assert seen(ill[0], interval(2), ill[2]) == []  # it has passed between
    (alarm,) = seen(*ill)
    assert (alarm.kind, alarm.rule, alarm.layers, alarm.casts) == ("layer", rule, ["b"], ["b.weight"])
    assert (alarm.first_step, alarm.last_step, alarm.times) == (51, 200, 3)
    assert alarm.skip == ["b"]
    assert skip_of([alarm]) == ("b",)
    for text in (alarm.cause, alarm.consequence, alarm.advice):
        assert len(text) > 20
    assert "skip=('b',)" in str(alarm)


@pytest.mark.parametrize(
    "changed",
    [
        {"clipped_steps": {4: 10}, "clipped_bits": {4: 3.0}},
        {"clipped_steps": {4: 50}, "clipped_bits": {4: 0.5}},
        {"flushed": {4: 30, 5: 150}},
        {"off_bits": {4: 1.0}},
        {"noise": {4: 500.0}, "clipped": {4: 1}},
        {"noise": {4: 9.9}},
    ],
)
def test_what_is_within_the_limits_is_none(changed: dict[str, Any]) -> None:
    assert seen(*(interval(number, **changed) for number in range(1, 4))) == []


def test_a_step_in_which_casts_clip_is_an_event() -> None:
    (alarm,) = seen(interval(1), of=bits(s7=3.5, s8=3.1, s20=3.0))
    assert (alarm.kind, alarm.rule, alarm.casts) == ("event", "outlier step", ["a.input"])
    assert (alarm.first_step, alarm.last_step, alarm.times) == (58, 59, 2)
    assert "3.5 bits" in alarm.value
    assert alarm.skip == []
    assert len(seen(interval(1), of=bits(s7=3.5, s13=3.5))) == 2  # five steps apart are one, six are two
    assert seen(interval(0), of=bits(s7=3.5)) == []  # scales follow few amaxes yet


def test_what_is_not_finite_is_an_event_at_once() -> None:
    (alarm,) = seen(interval(0), of=bits(s7=math.nan))
    assert (alarm.kind, alarm.rule, alarm.first_step, alarm.casts) == ("event", "non-finite", 8, ["a.input"])
    (alarm,) = seen(interval(0, nonfinite={5: 2}), recipe=Float8CurrentScaling())
    assert (alarm.kind, alarm.rule, alarm.casts) == ("event", "non-finite", ["b.grad_output"])
    # the sample finds the inf or NaN that an amax has shown
    (alarm,) = seen(interval(0, nonfinite={0: 2}), of=bits(s7=math.nan))
    assert (alarm.first_step, alarm.last_step, alarm.times) == (8, 8, 1)


def test_a_sampled_nan_has_the_step_of_its_sample() -> None:
    alarms = Alarms(NAMES, ROLES, Float8CurrentScaling())
    (alarm,) = alarms.see(interval(1, nonfinite={5: 2}), np.zeros((0, len(NAMES))), sampled_step=73)
    assert (alarm.first_step, alarm.last_step, alarm.times) == (73, 73, 1)
    assert alarm.value == "2 values of inf or NaN in the sampled step"


def test_a_sampled_nan_long_before_an_event_is_another_one() -> None:
    alarms = Alarms(NAMES, ROLES, DelayedScaling())
    alarms.see(interval(0, nonfinite={5: 1}), bits(s40=math.nan), sampled_step=12)
    assert [(each.first_step, each.casts) for each in alarms.found] == [(41, ["a.input"]), (12, ["b.grad_output"])]


def test_an_event_has_the_value_of_its_worst_step() -> None:
    of = bits(s7=3.5, s8=12.0)
    of[7, 1] = 3.2
    (alarm,) = seen(interval(1), of=of)
    assert "1 of 6 quantized tensors clipped, by up to 12.0 bits" in alarm.value


def test_intervals_without_a_sample_do_not_end_a_streak() -> None:
    """As of a layer that runs in every second step."""
    nothing = {name: {4: 0.0} for name in ("casts", "elements", "signal", "noise", "zeros")}
    (alarm,) = seen(interval(1, flushed={4: 900}), interval(2, **nothing), interval(3, flushed={4: 900}))
    assert (alarm.rule, alarm.first_step, alarm.casts) == ("flushes", 51, ["b.weight"])


def test_a_layer_that_casts_nothing_never_ran() -> None:
    nothing = {name: dict.fromkeys((3, 4, 5), 0.0) for name in ("updates", "casts", "elements", "signal", "noise")}
    idle = [interval(number, **nothing) for number in range(4)]
    assert seen(*idle[:2]) == []
    (alarm,) = seen(*idle)
    assert (alarm.kind, alarm.rule, alarm.layers) == ("layer", "never ran", ["b"])
    assert (alarm.first_step, alarm.last_step, alarm.times) == (1, 200, 4)
    # one that stops running is not meant
    assert "never ran" not in [each.rule for each in seen(interval(0), *idle[1:], recipe=Float8CurrentScaling())]


def test_an_alarm_is_raised_once_and_followed() -> None:
    alarms = Alarms(NAMES, ROLES, DelayedScaling())
    new = [len(alarms.see(interval(number, flushed={4: 40 + number, 1: 35}), bits())) for number in range(5)]
    assert new == [0, 1, 0, 0, 0]
    (alarm,) = alarms.found
    assert alarm.casts == ["b.weight", "a.weight"]  # the worst first
    assert (alarm.times, alarm.last_step) == (5, 250)
    assert alarm.value.startswith("4.4%")  # the worst
