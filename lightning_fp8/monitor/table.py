"""The end of a monitored run as text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import numpy as np

from lightning_fp8.monitor.alarms import Alarm, skip_of
from lightning_fp8.monitor.record import Record


def table(record: Record, alarms: Sequence[Alarm], width: int = 80) -> str:
    """The summary of a run in one line, its alarms, and the recommended ``skip``, in lines of at most ``width``."""
    lines = wrap(verdict(record, len(alarms)), width)
    for alarm in alarms:
        lines += wrap(str(alarm), width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    if skip := skip_of(alarms):
        lines += wrap(f"skip={skip!r}", width, subsequent_indent=" " * 6, break_on_hyphens=False)
    return "\n".join(lines)


def verdict(record: Record, num_alarms: int) -> str:
    """The numbers of steps, quantized tensors and alarms, and the worst clipping and flushing."""
    steps = f"{record.num_steps} step{'s' * (record.num_steps != 1)}"
    if not record.names:
        return f"{steps} without FP8 layers under FP8Precision: only the loss is recorded"
    steps = f"FP8: {steps}, {len(record.names)} quantized tensors, {num_alarms} alarm{'s' * (num_alarms != 1)}"
    if not record.intervals:
        return steps
    worst = max(float(each["clipped_bits"].max(initial=0)) for each in record.intervals)
    shares = [share for each in record.intervals for share in each.flushed_share if not np.isnan(share)]
    details = []
    if any(each["updates"].any() for each in record.intervals):
        details.append(f"worst clip {worst:.1f} bits")
    if shares:
        details.append(f"{'' if details else 'worst '}flush {max(shares):.2%}")
    return ", ".join([steps, *details])
