"""Alarms: findings in a run's figures, each with its cause, its consequence and advice.

There are two kinds. An *event* belongs to a step of the run, for example if many casts clip: look at its batch and the
learning rate. A *layer* loses values in several consecutive intervals: keep it in BF16, or use another recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fp8.monitor.record import Array, Interval
from lightning_fp8.names import layer_of_slot
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import Role

WARM_UP = 100
"""The number of steps at the start of a run, or of a resumed run, in which clipping is not an alarm, because scales are
computed from few amaxes."""

EVENT_BITS = 3.0
"""A step is an event if a cast's largest value is more than 2**3 times what its scale allows."""

CLIPPED_BITS = 0.5
CLIPPED_STEPS = 0.2
"""A cast clips if more than this share of an interval's steps exceed its scale, the worst by more than these bits."""

FLUSHED = {False: 0.03, True: 0.15}
"""The shares of nonzero values that may become 0, for inputs and weights (False) and for gradients (True)."""

STALE_BITS = 4.0
"""A scale is stale if the amax that it is computed from is more than 2**4 times the current one."""

STANDING_BITS = 1.0
"""A scale is standing if it differs from the scale of its history by more than a factor of 2."""

LEAST_DECIBELS = 20.0
"""The least ratio of signal to noise. A cast to E4M3 has 31 dB, a cast to E5M2 25 dB."""

NEIGHBOURS = 5
"""Events that are at most this many steps apart are combined."""

Rule = Literal[
    "outlier step", "non-finite", "clips", "flushes", "stale scale", "standing scale", "never ran", "inexact"
]

_IN_A_ROW: dict[Rule, int] = {"never ran": 3}
"""The number of consecutive intervals before a rule raises an alarm; 2 for other rules."""

_OF_SAMPLES: tuple[Rule, ...] = ("flushes", "stale scale", "inexact")
"""The rules that need a sample. An interval without one does not end a streak."""

_TEXT: dict[Rule, tuple[str, str, str]] = {
    "outlier step": (
        "values exceed the scales, which delayed scaling computes from the amaxes of earlier steps",
        "in this step they were clipped to the format's largest value; the scales have been updated since",
        "check the batch, the learning rate and gradient clipping; recipe='tensorwise' computes scales in each step",
    ),
    "non-finite": (
        "inf or NaN before the cast",
        "FP8 propagates NaN; delayed scales ignore it",
        "find the operation that computed it; torch.autograd.set_detect_anomaly(True) finds it in the backward pass",
    ),
    "clips": (
        "its values grow in each step, faster than its scale",
        "the largest values are clipped in many steps",
        "use DelayedScaling(margin=1) or recipe='tensorwise', or keep it in BF16",
    ),
    "flushes": (
        "its values span more binades than the format has",
        "small values become 0",
        "use recipe='blockwise' or 'mxfp8', which have scales for blocks of values, or keep it in BF16",
    ),
    "stale scale": (
        "the history contains an amax far above the current one",
        "small values become 0 until it has left the history",
        "use DelayedScaling with a shorter amax_history_len, or recipe='tensorwise'",
    ),
    "standing scale": (
        "its scale is not updated: no optimizer that steps has a parameter of its model, or something restores it",
        "values clip or become 0 once they leave the range of an earlier step",
        "add one to an optimizer, call update_fp8_scales(model) after each step, or keep it in BF16",
    ),
    "never ran": (
        "it is planned in FP8, but did not run in FP8",
        "it ran in high precision, or was not called",
        "print(plugin.summary) shows the layers that ran; keep it in BF16 if it is never called",
    ),
    "inexact": (
        "its values are so spread that most of them are rounded coarsely",
        "the inputs of the GEMM have few correct bits",
        "use recipe='blockwise' or 'mxfp8', or keep it in BF16",
    ),
}
"""Cause, consequence, advice."""


@dataclass
class Alarm:
    """One finding.

    Attributes:
        kind: ``"event"`` or ``"layer"``.
        rule: the rule that raised it.
        layers, casts: the affected layers and casts. Those of an event are in the order of a step, others worst first.
        first_step, last_step: the first and last step, or the steps of the first and last interval in which it was
            found, counted from 1.
        times: the number of steps or intervals.
        value: the worst value, with its unit.
        cause, consequence, advice: text.
        skip: globs for ``FP8Precision(skip=...)`` that keep the layers in BF16; empty for events.
        amount: the worst value as a number; not in the record.
    """

    kind: Literal["event", "layer"]
    rule: Rule
    layers: list[str]
    casts: list[str]
    first_step: int
    last_step: int
    times: int
    value: str
    cause: str
    consequence: str
    advice: str
    skip: list[str] = field(default_factory=list)
    amount: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The alarm as a dictionary, for the record."""
        return {name: value for name, value in asdict(self).items() if name != "amount"}

    def __str__(self) -> str:
        more = len(self.casts) - 1
        where = self.casts[0] + (f" and {more} more tensor{'s' * (more > 1)}" if more else "")
        when = f"step {self.first_step}" if self.kind == "event" else f"since step {self.first_step}"
        skip = f" (skip={tuple(self.skip)!r})" if self.skip else ""
        return (
            f"FP8 {self.rule}, {when}: {where}, {self.value}. {_sentence(self.cause)} {_sentence(self.consequence)} "
            f"{_sentence(self.advice + skip)}"
        )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


class _Finding(NamedTuple):
    rule: Rule
    cast: int
    amount: float
    value: str


class _Streak(NamedTuple):
    length: int
    first_step: int


class Alarms:
    """Finds alarms, interval by interval.

    Attributes:
        found: all alarms, in the order in which they were found. An alarm that is found again is updated in place.
    """

    def __init__(self, names: Sequence[str], roles: Sequence[Role], recipe: Recipe) -> None:
        self.found: list[Alarm] = []
        self._names = names
        self._roles = roles
        self._recipe = recipe
        self._intervals = 0
        self._streaks: dict[tuple[Rule, int], _Streak] = {}
        layers = [layer_of_slot(name) for name in names]
        self._layers = np.array([layers.index(layer) for layer in layers], dtype=np.intp)
        self._ran = np.zeros(len(names), bool)  # by the first cast of a layer
        self._unobserved = np.zeros(len(names), bool)

    def see(
        self,
        interval: Interval,
        bits: Array,
        warm_up: int = WARM_UP,
        ran_unobserved: NDArray[np.bool_] | None = None,
        sampled_step: int | None = None,
    ) -> list[Alarm]:
        """The new alarms of the next interval.

        Args:
            bits: :func:`lightning_fp8.monitor.casts.clipped_bits` of its steps.
            warm_up: the last step, counted from 1, in which clipping is not an alarm.
            ran_unobserved: bool ``[n]``, :meth:`lightning_fp8.monitor.casts.Casts.ran_unobserved`.
            sampled_step: the step that was sampled, counted from 1. ``None`` is the first one.
        """
        self._intervals += 1
        before = len(self.found)
        self._events(interval, bits, warm_up)
        self._sampled_event(interval, bits, interval.first_step if sampled_step is None else sampled_step)
        if ran_unobserved is not None:
            self._unobserved = ran_unobserved
        unsampled = interval["casts"] == 0
        kept = {key: each for key, each in self._streaks.items() if key[0] in _OF_SAMPLES and unsampled[key[1]]}
        ripe: dict[Rule, list[_Finding]] = {}
        for each in self._of_casts(interval, warm_up):
            length, first = self._streaks.get((each.rule, each.cast), _Streak(0, interval.first_step))
            kept[each.rule, each.cast] = _Streak(length + 1, first)
            of_rule = ripe.setdefault(each.rule, [])
            if length + 1 >= _IN_A_ROW.get(each.rule, 2):
                of_rule.append(each)
        self._streaks = kept
        for rule, findings in ripe.items():
            self._raise(rule, findings, interval)
        return self.found[before:]

    def _events(self, interval: Interval, bits: Array, warm_up: int) -> None:
        for row, of_step in enumerate(bits):
            step = interval.first_step + row
            nonfinite = np.flatnonzero(np.isnan(of_step))
            if len(nonfinite):
                self._event("non-finite", step, nonfinite, len(nonfinite), "an amax of inf or NaN")
            clipped = np.nan_to_num(of_step)
            hit = np.flatnonzero(clipped > CLIPPED_BITS)
            if step > warm_up and clipped.max(initial=0) > EVENT_BITS:
                in_a_step = np.argsort([self._roles[int(cast)].is_gradient for cast in hit], kind="stable")
                text = f"{len(hit)} of {len(self._names)} quantized tensors clipped, by up to {clipped.max():.1f} bits"
                self._event("outlier step", step, hit[in_a_step], float(clipped.max()), text)

    def _sampled_event(self, interval: Interval, bits: Array, step: int) -> None:
        """Add an event for sampled values of inf or NaN, unless the amax of a step has shown them."""
        seen = np.isnan(bits).any(0) if len(bits) else np.zeros(len(self._names), bool)
        casts = np.flatnonzero((interval["nonfinite"] > 0) & ~seen)
        if len(casts):
            number = int(interval["nonfinite"][casts].max())
            text = f"{number} value{'s' * (number > 1)} of inf or NaN in the sampled step"
            self._event("non-finite", step, casts, len(casts), text)

    def _event(self, rule: Rule, step: int, casts: NDArray[np.intp], amount: float, value: str) -> None:
        """Add an event, or combine it with the last one of the rule, which then has the casts of the worse step."""
        last = next((alarm for alarm in reversed(self.found) if alarm.rule == rule), None)
        names = [self._names[cast] for cast in casts]
        if last is None or abs(step - last.last_step) > NEIGHBOURS:
            event = Alarm("event", rule, _layers(names), names, step, step, 1, value, *_TEXT[rule], amount=amount)
            self.found.append(event)
            return
        if step > last.last_step:
            last.last_step, last.times = step, last.times + 1
        if amount > last.amount:
            last.casts, last.layers, last.value, last.amount = names, _layers(names), value, amount

    def _of_casts(self, interval: Interval, warm_up: int) -> Iterator[_Finding]:
        """The findings in the figures of the interval's casts."""
        sampled, updates = interval["casts"] > 0, interval["updates"]
        np.logical_or.at(self._ran, self._layers, sampled | (updates > 0))
        any_ran = bool(self._ran.any())  # otherwise nothing is known, as in a replayed CUDA graph
        flushed, decibels = interval.flushed_share, interval.decibels
        delayed = self._recipe if isinstance(self._recipe, DelayedScaling) else None
        is_early = interval.last_step <= warm_up
        for cast, role in enumerate(self._roles):
            if not self._ran[self._layers[cast]]:
                if any_ran and not self._unobserved[cast]:
                    yield _Finding("never ran", cast, 0.0, f"nothing cast in {self._intervals} intervals")
                continue
            if flushed[cast] > FLUSHED[role.is_gradient]:
                stale = delayed is not None and interval["window"][cast] > 2**STALE_BITS * interval["amax"][cast]
                rule: Rule = "stale scale" if stale else "flushes"
                yield _Finding(rule, cast, flushed[cast], f"{flushed[cast]:.1%} of its values became 0")
            elif decibels[cast] < LEAST_DECIBELS and not interval["clipped"][cast] and not is_early:
                yield _Finding("inexact", cast, -decibels[cast], f"{decibels[cast]:.1f} dB of signal to noise")
            if delayed is None or is_early:
                continue
            share = interval["clipped_steps"][cast] / max(updates[cast], 1)
            if share > CLIPPED_STEPS and interval["clipped_bits"][cast] > CLIPPED_BITS:
                yield _Finding("clips", cast, share, f"in {share:.0%} of the steps")
            bits = interval["off_bits"][cast]
            if sampled[cast] and not updates[cast]:
                yield _Finding("standing scale", cast, 0.0, "no update saw its amax")
            elif bits > STANDING_BITS:
                yield _Finding("standing scale", cast, bits, f"its scale is {bits:.1f} bits from that of its history")

    def _raise(self, rule: Rule, findings: Sequence[_Finding], interval: Interval) -> None:
        """Add an alarm for the casts that have none of this rule yet, and update existing alarms of others."""
        of_rule = [alarm for alarm in self.found if alarm.rule == rule]
        known = {name: alarm for alarm in of_rule for name in alarm.casts}
        new = [each for each in findings if self._names[each.cast] not in known]
        for alarm in of_rule:
            if again := [each for each in findings if known.get(self._names[each.cast]) is alarm]:
                worst = max(again, key=lambda each: each.amount)
                alarm.last_step, alarm.times = interval.last_step, alarm.times + 1
                if worst.amount > alarm.amount:
                    alarm.value, alarm.amount = worst.value, worst.amount
        if not new:
            return
        new.sort(key=lambda each: (-each.amount, self._roles[each.cast].is_gradient))
        names = [self._names[each.cast] for each in new]
        layers, streaks = _layers(names), [self._streaks[rule, each.cast] for each in new]
        first, times = min(each.first_step for each in streaks), max(each.length for each in streaks)
        told = new[0].value, *_TEXT[rule], layers, new[0].amount
        self.found.append(Alarm("layer", rule, layers, names, first, interval.last_step, times, *told))


def _layers(casts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(layer_of_slot(name) for name in casts))


def skip_of(alarms: Sequence[Alarm]) -> tuple[str, ...]:
    """The names of the layers that alarms recommend to keep in BF16, for ``FP8Precision(skip=...)``."""
    return tuple(dict.fromkeys(name for alarm in alarms for name in alarm.skip))
