"""The table of a conversion, 80 columns wide, with equal layers grouped in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from lightning_fp8.names import prefixes

WIDTH = 80
_NARROWEST_REASON = 24
_INDENT = 4


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: a module's name, or a pattern for several: ``layers.{1-30}.mlp.{gate,up}_proj``, ``layers.0.*``.
        shape: the shape as text; empty if the modules of the line have different shapes.
        precision: ``"FP8"`` or the name of the high precision.
        reason: the reason for high precision; empty in FP8.
        count: the number of modules in the line.
        experts: the share of the model's parameters that are experts in the line.
    """

    name: str
    shape: str
    precision: str
    reason: str
    count: int = 1
    experts: float = 0

    @property
    def because(self) -> str:
        """The reason, and the share of experts."""
        share = f"experts: {100 * self.experts:.3g} % of the parameters" if self.experts else ""
        return "; ".join(filter(None, (self.reason, share)))


def grouped(rows: Sequence[Row]) -> list[Row]:
    """Group rows without loss of information, in the order of the first row of each group.

    There are three rules, which are applied in this order. All rows below a module become ``module.*`` if they have the
    same reason, but for experts in FP8. Rows whose names differ in a number, such as the index of a block, are combined
    to a range of numbers. Rows whose names differ in one other part are combined with the alternatives in braces.
    """
    found = _subtrees(rows)
    deepest = max((row.name.count(".") + 1 for row in found), default=0)
    for place in reversed(range(deepest)):
        found = _merged(found, place, str.isdecimal, _ranges)
    for place in reversed(range(deepest)):
        found = _merged(found, place, lambda part: "{" not in part and part != "*", _alternatives)
    return found


def rendered(rows: Iterable[Row], heading: str, width: int | None = WIDTH) -> list[str]:
    """Lines of at most ``width`` columns. Long reasons are wrapped, and long names are shortened in the middle.

    Args:
        heading: the heading of the column of precisions, ``"planned"`` or ``"ran in"``.
        width: None does not limit the lines.
    """
    cells = [(row.name, row.shape, row.precision, f"×{row.count}" * (row.count > 1), row.because) for row in rows]
    head = ("layer", "out × in", heading, "")
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(4)]
    if width is not None:
        widths[0] = max(min(widths[0], width - sum(widths[1:]) - 6), len("layer"))
    before = sum(size + 2 for size in widths if size)

    def start_of(name: str, *others: str) -> str:
        columns = zip((_shortened(name, widths[0]), *others), widths)
        return "  ".join(cell.ljust(size) for cell, size in columns if size)

    lines: list[str] = []
    for *fixed, reason in cells:
        start = start_of(*fixed)
        if not reason or width is None or before + len(reason) <= width:
            lines.append(f"{start}  {reason}".rstrip())
        elif width - before >= _NARROWEST_REASON:
            first, *more = wrap(reason, width - before, break_on_hyphens=False)
            lines += [f"{start}  {first}", *(" " * before + line for line in more)]
        else:
            below = wrap(reason, width - _INDENT, break_on_hyphens=False)
            lines += [start.rstrip(), *(" " * _INDENT + line for line in below)]
    above_reasons = "because" if width is None or before + len("because") <= width else ""  # else all are below
    top = f"{start_of(*head)}  {above_reasons}".rstrip()
    return [top, "-" * max(map(len, [top, *lines])), *lines]


def _shortened(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    left = (width - 3) // 2
    return f"{name[:left]}...{name[len(name) - (width - 3 - left) :]}"


def _subtrees(rows: Sequence[Row]) -> list[Row]:
    """Combine rows to ``module.*`` for the outermost modules whose rows all have one reason and one precision."""
    below: dict[str, list[Row]] = {}
    for row in rows:
        for prefix in prefixes(row.name):
            below.setdefault(prefix, []).append(row)

    def alike(first: Row, *others: Row) -> bool:
        same = all((row.reason, row.precision) == (first.reason, first.precision) for row in others)
        return bool(first.reason and others) and same and not (first.experts and first.precision == "FP8")

    whole = {prefix for prefix, of_prefix in below.items() if alike(*of_prefix)}
    found: dict[int | str, Row] = {}
    for number, row in enumerate(rows):
        outermost = next((prefix for prefix in prefixes(row.name) if prefix in whole), None)
        if outermost is None:
            found[number] = row
        elif outermost not in found:
            shapes = {each.shape for each in below[outermost]}
            shape = shapes.pop() if len(shapes) == 1 else ""
            count, experts = len(below[outermost]), sum(each.experts for each in below[outermost])
            found[outermost] = Row(f"{outermost}.*", shape, row.precision, row.reason, count, experts)
    return list(found.values())


def _merged(
    rows: Sequence[Row], place: int, fits: Callable[[str], bool], together: Callable[[list[str]], str]
) -> list[Row]:
    """Combine rows that differ only in the part of their names at ``place``; ``together`` formats the parts."""
    groups: dict[Hashable, list[Row]] = {}
    for number, row in enumerate(rows):
        parts = row.name.split(".")
        mergeable = place < len(parts) and fits(parts[place])
        others = (*parts[:place], *parts[place + 1 :], len(parts)) if mergeable else number
        groups.setdefault((others, row.shape, row.precision, row.reason, row.count), []).append(row)
    found = []
    for alike in groups.values():
        first = alike[0]
        if len(alike) > 1:
            parts = first.name.split(".")
            parts[place] = together([row.name.split(".")[place] for row in alike])
            count, experts = sum(row.count for row in alike), sum(row.experts for row in alike)
            first = replace(first, name=".".join(parts), count=count, experts=experts)
        found.append(first)
    return found


def _ranges(numbers: list[str]) -> str:
    """``{0,2-4}`` for 0, 2, 3 and 4."""
    runs: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{{{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}}}"


def _alternatives(parts: list[str]) -> str:
    """``{gate,up}_proj`` for ``gate_proj`` and ``up_proj``; the braces begin or end at an underscore."""
    before = re.sub(r"[^_]*$", "", _shared_start(parts))
    after = re.sub(r"^[^_]*", "", _shared_start([part[len(before) :][::-1] for part in parts])[::-1])
    middle = [part[len(before) : len(part) - len(after)] for part in parts]
    if not all(middle):
        before, after, middle = "", "", parts
    return f"{before}{{{','.join(middle)}}}{after}"


def _shared_start(texts: list[str]) -> str:
    length = next((at for at, letters in enumerate(zip(*texts)) if len(set(letters)) > 1), min(map(len, texts)))
    return texts[0][:length]
