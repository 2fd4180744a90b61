"""Suite ``monitor``: what ``FP8Monitor`` costs, by the training step of suite ``emulation``.

The steps of one model alternate: plain, sampled, and sampled with what other recipes would lose. Following is what
delayed scaling's steps do besides, copy amaxes and scales, and a report what the host does once per interval. The cost
of a run is that of its steps at the default interval, relative to plain steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import Contender, measure
from benchmarks.suites import emulation
from lightning_fp8.monitor.alarms import Alarms
from lightning_fp8.monitor.callback import WHAT_IF_EVERY, FP8Monitor
from lightning_fp8.monitor.casts import Casts, Sampler, StepRows, StepTrace, clipped_bits, step_figures
from lightning_fp8.monitor.record import Interval
from lightning_fp8.numerics.recipes import DelayedScaling, make_recipe
from lightning_fp8.ops.sample import largest_rounded

RECIPES = ("delayed", "tensorwise", "blockwise")
LIMIT = 0.01
"""Of a run's time."""
SECONDS = 20.0
"""Measuring time of each kind of step."""
PLAIN = "without a monitor"

unavailable = emulation.unavailable


def run(plan: Plan) -> Iterator[Result]:
    plan.say("monitor: a training step of a Llama on one thread")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for recipe in RECIPES:
            yield from _of_recipe(recipe, plan)
    finally:
        torch.set_num_threads(num_threads)


def _of_recipe(recipe: str, plan: Plan) -> Iterator[Result]:
    calls = _calls(recipe, plan.dry)
    times = measure(emulation.ProcessorClock(), [Contender(call) for call in calls.values()], plan.seconds(SECONDS))
    low = {name: each.low for name, each in zip(calls, times)}
    plain, every = low[PLAIN], FP8Monitor().every_n_steps
    cost = low["following"] + low["report"] / every
    cost += (low["sampled"] - plain) / every + (low["what if"] - low["sampled"]) / (every * WHAT_IF_EVERY)
    work, shape = f"training step of a Llama, {recipe}", emulation._tokens(plan.dry)
    for name, each in zip(calls, times):
        over = {} if name == PLAIN else {PLAIN: plain / each.low}
        yield Result(work, f"{OURS}, {name}", shape, "bfloat16", times=each, over=over)
    share = cost / plain
    over, target = {PLAIN: 1 / (1 + share)}, {f"over {PLAIN}": 1 / (1 + LIMIT)}
    yield Result(work, f"{OURS}, a run", shape, "bfloat16", over=over, target=target, note=f"every {every} steps")


def _calls(recipe: str, dry: bool) -> dict[str, Callable[[], Any]]:
    """The kinds of steps of one model, and a report."""
    step, model = emulation.step_and_model(recipe, dry)
    step()
    of_recipe = make_recipe(recipe)
    casts = Casts.of(model)
    formats = [of_recipe.cast(role).float8 for role in casts.roles]
    largest = np.array([largest_rounded(float8) for float8 in formats])
    fp8_max = np.array([float8.max for float8 in formats])
    steps, delayed = FP8Monitor().every_n_steps, isinstance(of_recipe, DelayedScaling)
    trace = StepTrace(casts.slots, steps)
    trace.stop()
    sampler, alarms = Sampler(casts.slots), Alarms(casts.names, casts.roles, of_recipe)

    def following() -> None:
        for history in trace.histories if delayed else ():
            trace.before_update(history)

    def sampled(what_if: bool = False) -> None:
        sampler.begin(what_if)
        step()
        sampler.end()

    def report() -> None:
        sampler.read()
        n = len(casts.names)
        rows = trace.read(steps) if delayed else StepRows(np.zeros((0, n)), np.zeros((0, n)))
        bits = clipped_bits(rows, largest)
        alarms.see(Interval(1, steps, 1.0, step_figures(rows, bits, fp8_max, 1)), bits)

    return {
        PLAIN: step,
        "following": following,
        "sampled": sampled,
        "what if": lambda: sampled(what_if=True),
        "report": report,
    }
