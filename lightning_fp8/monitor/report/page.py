"""The page as text: the tables are written here, and its script draws the pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import chain

import numpy as np

from lightning_fp8.monitor.advice import FLUSHED_BUDGET, LEAST_DECIBELS, cheapest, measured_loss, what_if_losses
from lightning_fp8.monitor.record import Record
from lightning_fp8.monitor.report.data import drawn, label
from lightning_fp8.monitor.table import verdict
from lightning_fp8.version import __version__

MOST_ROWS = 60
"""Rows of the table of casts; the record has all."""


def page(record: Record, other: Record | None = None) -> str:
    """One HTML page of ``record``; ``other`` is a run whose loss is drawn beside it."""
    here = files("lightning_fp8.monitor.report")
    template = (here / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": escape(f"{label(record)}: {record.num_steps} steps"),
        "style": (here / "page.css").read_text(encoding="utf-8"),
        "headline": escape(verdict(record, len(record.alarms))),
        "recipe": escape(record.recipe_fields or record.recipe),
        "about": escape(about(record)),
        "alarms": alarms(record),
        "difference": "" if other is None else difference(record, other),
        "losses": loss_table(record, other),
        "advice": advice(record),
        "casts": casts(record),
        "layers": layers(record),
        "environment": environment(record, other),
        "version": escape(__version__),
        "data": json.dumps(_finite(drawn(record, other)), separators=(",", ":")).replace("<", "\\u003c"),
        "script": (here / "page.js").read_text(encoding="utf-8"),
    }
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)


def _finite(value: object) -> object:
    """JSON has neither NaN nor inf: null."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """A table of escaped cells, which scrolls in its own box."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def alarms(record: Record) -> str:
    """Each alarm with its cause, consequence and advice."""
    if not record.alarms:
        return "<p>None.</p>"
    found = []
    for alarm in record.alarms:
        first, last = alarm["first_step"], alarm["last_step"]
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        more = f" and {len(alarm['casts']) - 6} more" if len(alarm["casts"]) > 6 else ""
        hit, skip = ", ".join(alarm["casts"][:6]) + more, f"skip={tuple(alarm['skip'])!r}"
        skip = f"<dt>Keep in BF16</dt><dd><code>{escape(skip)}</code></dd>" if alarm["skip"] else ""
        found.append(
            f"<li><h3>{escape(alarm['rule'])}, {when}: {escape(alarm['value'])}</h3><dl>"
            f"<dt>Where</dt><dd>{escape(hit)}</dd><dt>Cause</dt><dd>{escape(alarm['cause'])}</dd>"
            f"<dt>Consequence</dt><dd>{escape(alarm['consequence'])}</dd>"
            f"<dt>Advice</dt><dd>{escape(alarm['advice'])}</dd>{skip}</dl></li>"
        )
    return f"<ol>{''.join(found)}</ol>"


def loss_table(record: Record, other: Record | None) -> str:
    """A table of the mean training loss of each interval of one run, or of both."""
    runs = [each for each in (record, other) if each is not None]
    rows = [
        (label(each), f"{interval.first_step} to {interval.last_step}", f"{interval.loss:.4f}")
        for each in runs
        for interval in each.intervals
    ]
    return table(("run", "steps", "mean loss"), rows, "Training loss of each interval")


def difference(record: Record, other: Record) -> str:
    """A table of the loss of ``record`` minus that of ``other``, over intervals of equal steps: last ones, and all."""
    losses = {(each.first_step, each.last_step): each.loss for each in other.intervals}
    both = [
        (each.first_step, each.last_step, each.loss, loss)
        for each in record.intervals
        if np.isfinite([each.loss, loss := losses.get((each.first_step, each.last_step), np.nan)]).all()
    ]
    if not both:
        return "<p>The runs have no interval of the same steps, so their losses are not subtracted.</p>"
    rows = []
    for what, count in (("last interval", 1), ("last quarter", -(-len(both) // 4)), ("all", len(both))):
        first, last, ours, theirs = np.transpose(both[-count:])
        (loss, of_other), steps = np.average([ours, theirs], 1, last - first + 1), f"{first[0]:.0f} to {last[-1]:.0f}"
        share = f"{loss / of_other - 1:+.2%}" if of_other > 0 else ""
        rows.append((what, f"{loss - of_other:+.4f}", share, f"{loss:.4f}", f"{of_other:.4f}", steps))
    heading = ("mean of", "difference", "relative", label(record), label(other), "steps")
    return table(heading, rows, f"{label(record)} minus {label(other)}, in the unit of the loss")


def advice(record: Record) -> str:
    """What each recipe loses, and the cheapest within the budget."""
    if not record.names:
        return "<p>The run had no FP8 casts.</p>"
    losses = {each.recipe: each for each in what_if_losses(record)}
    found = cheapest(list(losses.values()))
    budget = f"at most {FLUSHED_BUDGET:.0%} of a tensor's values become 0, and at least {LEAST_DECIBELS:g} dB"
    if found is None:
        text = "No step was sampled."
    elif not found.over_budget():
        text = f"The cheapest recipe without state within the budget is {found.recipe}: {budget}."
    else:
        layers = list(dict.fromkeys(record.layer(cast) for cast in found.over_budget()))
        text = (
            f"No recipe is within the budget for all tensors: {budget}. {found.recipe} has the fewest beyond it; keep "
            f"these layers in BF16: {', '.join(layers[:8])}{' and more' if len(layers) > 8 else ''}."
        )
    losses = {f"{record.recipe} (this run)": measured_loss(record), **losses}
    rows = [
        (
            name,
            f"{np.nanmax(loss.flushed):.3%}",
            record.names[int(np.nanargmax(loss.flushed))],
            str(len(loss.over_budget())),
            f"{np.fmin.reduce(loss.decibels):.1f} dB",
        )
        for name, loss in losses.items()
        if loss.is_known
    ]
    heading = ("recipe", "largest share flushed", "of", "tensors over the budget", "least signal to noise")
    return f"<p>{escape(text)}</p>" + table(heading, rows, "What the run lost, and what other recipes would have lost")


def casts(record: Record) -> str:
    """The casts, the worst first."""
    if not record.names or not record.intervals:
        return "<p>The run had no FP8 casts.</p>"
    total, measured = record.total(), measured_loss(record)
    share = np.nan_to_num(measured.flushed)
    order = np.lexsort((-share, -total["clipped_bits"]))[:MOST_ROWS]
    rows = [
        (
            record.names[cast],
            f"{bits:.2f}" if (bits := total["clipped_bits"][cast]) else "0",
            str(at) if (at := int(total["clipped_at"][cast])) else "",
            str(int(total["clipped_steps"][cast])),
            _number(total["head_room"][cast], ".2f"),
            _number(measured.flushed[cast], ".3%"),
            _number(measured.decibels[cast], ".1f"),
            _number(total["amax"][cast], ".3g"),
            _number(total["scale"][cast], ".3g"),
        )
        for cast in order.tolist()
    ]
    heading = (
        "tensor", "clipped, bits", "in step", "steps clipped", "least headroom, bits", "most flushed", "least dB",
        "largest amax", "last scale",
    )  # fmt: skip
    left = len(record.names) - len(rows)
    return table(heading, rows, f"The worst tensors first{f'; {left} more are in the record' if left else ''}")


def _number(value: float, form: str) -> str:
    return "" if np.isnan(value) else format(value, form)


def layers(record: Record) -> str:
    """The plan, and what ran."""
    rows = [(each["name"], each["shape"], each["precision"], each["reason"]) for each in record.layers]
    return f"<p>{escape(record.verdict)}</p>" + table(
        ("layer", "shape", "runs in", "because"), rows, "Matrices of the model"
    )


def about(record: Record) -> str:
    """The file of the record, the start of training, device and versions, as far as the record has them."""
    names = ("record", "started", "device", "torch", "lightning_fp8")
    return ", ".join(f"{name} {record.environment[name]}" for name in names if name in record.environment)


def environment(record: Record, other: Record | None) -> str:
    """A table of versions and device, with a column for each run."""
    runs = [each for each in (record, other) if each is not None]
    columns = [{**each.environment, "recipe": each.recipe_fields or each.recipe} for each in runs]
    rows = [(name, *(each.get(name, "") for each in columns)) for name in dict.fromkeys(chain(*columns))]
    return table(("what", *map(label, runs)), rows, "Environment")
