"""A record as what the page's script draws: lines, and grids of one byte for each cell."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_fp8.monitor.record import Array, Interval, Record, merged

COLUMNS = 128
"""Of a grid; more intervals are merged."""

ROLES = {"input": "Inputs", "weight": "Weights", "grad_output": "Gradients"}


@dataclass(frozen=True)
class Scale:
    """The encoding of a heat map's values as bytes.

    Bytes 1 to 255 map linearly to the values from ``low`` to ``high``; values outside are clamped. 0 marks a cell
    without a value.

    Attributes:
        low, high: the values of the bytes 1 and 255.
        unit: the unit of the values.
        log: whether the values are shares, and the bytes encode their ``log10``. ``low`` and ``high`` are then
            logarithms, too.
        dark_is_low: whether low values are the critical ones, which are highlighted; otherwise high values are.
    """

    low: float
    high: float
    unit: str
    log: bool = False
    dark_is_low: bool = False

    def drawn(self, values: Array) -> dict[str, Any]:
        """``values [rows, columns]``, and what the script needs to read them."""
        scale = {"low": self.low, "high": self.high, "unit": self.unit, "log": self.log, "darkIsLow": self.dark_is_low}
        return {**scale, "cells": self.encoded(values)}

    def encoded(self, values: Array) -> str:
        """``values [rows, columns]`` row by row, in base64; NaN and, of a logarithm, 0 are nothing."""
        with np.errstate(divide="ignore", invalid="ignore"):
            of_scale = np.log10(values) if self.log else values
        known = np.isfinite(of_scale)
        part = (np.where(known, of_scale, self.low) - self.low) / (self.high - self.low)
        codes = np.where(known, 1 + np.rint(254 * np.clip(part, 0, 1)), 0)
        return base64.b64encode(codes.astype(np.uint8).tobytes()).decode()


CLIPPED = Scale(0.0, 8.0, "bits")
FLUSHED = Scale(-5.0, 0.0, "of its values", log=True)
HEAD_ROOM = Scale(-8.0, 8.0, "bits", dark_is_low=True)


def folded(intervals: list[Interval]) -> list[Interval]:
    """``intervals``, neighbours merged so that there are at most :data:`COLUMNS`."""
    size = max(1, -(-len(intervals) // COLUMNS))
    return [merged(intervals[index : index + size]) for index in range(0, len(intervals), size)]


def stacked(intervals: list[Interval], name: str) -> Array:
    """One figure of all casts, ``[n, columns]``."""
    return np.stack([each[name] for each in intervals], 1)


def grids(record: Record, intervals: list[Interval]) -> list[dict[str, Any]]:
    """Heat maps, a row for each layer: what, of which role, and its cells."""
    if not intervals or not record.names:
        return []
    clipped = stacked(intervals, "clipped_bits")
    flushed = np.stack([each.flushed_share for each in intervals], 1)
    kinds = [("Flushed to zero", flushed, FLUSHED, "largest share of values that became 0")]
    if stacked(intervals, "updates").any():
        room = stacked(intervals, "head_room")
        kinds.insert(0, ("Clipped", np.where(clipped > 0, clipped, np.nan), CLIPPED, "bits beyond the largest value"))
        kinds.append(("Headroom", room, HEAD_ROOM, "binades between the amax and the largest value; below 0: clipped"))
    return [
        _grid(f"{title}: {of_role.lower()}", meaning, casts, values, scale, record)
        for title, values, scale, meaning in kinds
        for role, of_role in ROLES.items()
        if (casts := [index for index, each in enumerate(record.roles) if each == role])
    ]


def _grid(title: str, meaning: str, casts: list[int], values: Array, scale: Scale, record: Record) -> dict[str, Any]:
    worst = np.fmin.reduce(values[casts], 1) if scale.dark_is_low else np.fmax.reduce(values[casts], 1)
    order = np.argsort(np.where(np.isnan(worst), np.inf, worst if scale.dark_is_low else -worst), kind="stable")
    return {
        "title": title,
        "meaning": meaning,
        "rows": [record.layer(cast) for cast in casts],
        **scale.drawn(values[casts]),
        "worst": [
            [record.layer(casts[row]), float(worst[row])] for row in order[:8].tolist() if np.isfinite(worst[row])
        ],
    }


def lines_of(record: Record, intervals: list[Interval]) -> dict[str, Any]:
    """Binary logarithms of the amaxes and scales of all casts; none of recipes that do not keep them."""
    if not intervals or not record.names or not stacked(intervals, "updates").any():
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        amax, scale = (np.log2(stacked(intervals, name)) for name in ("amax", "scale"))
    known = np.concatenate([amax, scale])
    known = known[np.isfinite(known)]
    if not known.size:
        return {}
    binades = Scale(float(known.min()) - 1, float(known.max()) + 1, "log2")
    ends = {"low": binades.low, "high": binades.high}
    return {"names": record.names, **ends, "amax": binades.encoded(amax), "scale": binades.encoded(scale)}


FIRST_EXPONENT, EXPONENTS = -48, 80
"""The least exponent that is drawn, and how many."""

SHARES = Scale(-6.0, 0.0, "of its values", log=True)
_SMALLEST = {"E4M3": -10.0, "E5M2": -17.0}
_LARGEST = {"E4M3": 464.0, "E5M2": 61440.0}


def exponents_of(record: Record) -> dict[str, Any]:
    """Histograms of the exponents of all casts; with the scale of the last step, which values become 0 and clip.

    ``range`` has binary logarithms: values up to the first become 0, those beyond the second clip; null where no scale
    is known.
    """
    counts = record.exponents
    if not counts.any():
        return {}
    first = 127 + FIRST_EXPONENT
    inside = counts[:, first : first + EXPONENTS].copy()
    inside[:, 0] += counts[:, 1:first].sum(1)
    shares = inside / np.maximum(counts[:, 1:255].sum(1, keepdims=True), 1)
    scale = record.total()["scale"] if record.intervals else np.full(len(record.names), np.nan)
    ranges = [
        [_SMALLEST[name] - float(np.log2(each)), float(np.log2(_LARGEST[name] / each))] if each > 0 else None
        for name, each in zip(record.formats, scale)
    ]
    axis = {"names": record.names, "first": FIRST_EXPONENT, "columns": EXPONENTS, "range": ranges}
    return {**axis, **SHARES.drawn(shares)}


def drawn(record: Record, other: Record | None) -> dict[str, Any]:
    """All that the script draws."""
    intervals = folded(record.intervals)
    losses = [
        {"label": label(run), "points": [[at.last_step, at.loss] for at in run.intervals if np.isfinite(at.loss)]}
        for run in (record, other)
        if run is not None
    ]
    events = [
        {"step": alarm["first_step"], "text": f"{alarm['rule']}: {alarm['value']}"}
        for alarm in record.alarms
        if alarm["kind"] == "event"
    ]
    return {
        "steps": [[each.first_step, each.last_step] for each in intervals],
        "loss": losses,
        "events": events,
        "grids": grids(record, intervals),
        "lines": lines_of(record, intervals),
        "exponents": exponents_of(record),
    }


def label(record: Record) -> str:
    """What a run is called."""
    return f"FP8, {record.recipe}" if record.names else record.recipe or "BF16"
