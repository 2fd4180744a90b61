"""Time candidates for the same work alternately, and compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import Candidate, Result
from benchmarks.measuring.timing import clock_of, measure


def timed(plan: Plan, candidates: Sequence[Candidate], yardsticks: Sequence[str], seconds: float) -> Iterator[Result]:
    """Results with times and ratios to those of ``yardsticks``; ``seconds``: per candidate."""
    running = [(result, contender) for result, contender in candidates if contender is not None]
    times = measure(clock_of(plan.device), [contender for _, contender in running], plan.seconds(seconds))
    medians = {result.by: each.median for (result, _), each in zip(running, times) if result.by in yardsticks}
    for (result, _), each in zip(running, times):
        over = {by: other / each.median for by, other in medians.items() if by != result.by}
        yield replace(result, times=each, over=over)
    yield from (result for result, contender in candidates if contender is None)
