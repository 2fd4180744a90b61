"""The results of a run as a CSV file: a row for each contender, for other programs and for GitHub's view of tables."""

from __future__ import annotations

import csv
import io
from typing import Any

Entry = dict[str, Any]

COLUMNS = (
    "suite", "name", "by", "shape", "dtype", "correct", "ms", "ms low quartile", "ms high quartile", "TFLOP/s", "GB/s",
    "of a copy's bandwidth", "host µs", "times as fast as", "relative errors", "targets", "note",
)  # fmt: skip


def sheet(document: dict[str, Any]) -> str:
    """All entries of ``document``, in their order, with the numbers of the file."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for suite, entries in document["suites"].items():
        rows.writerows(_row(suite, entry) for entry in entries)
    return text.getvalue()


def _row(suite: str, entry: Entry) -> list[Any]:
    times = entry["milliseconds"] or {}
    met = {
        key: {True: "met", False: "missed", None: "not measured"}[value] for key, value in (entry["met"] or {}).items()
    }
    targets = {f"{key} {limit}": met[key] for key, limit in (entry["target"] or {}).items()}
    return [
        suite,
        entry["name"],
        entry["by"],
        "×".join(map(str, entry["shape"])),
        entry["dtype"],
        entry["correct"],
        *(times.get(key) for key in ("median", "low", "high")),
        entry["teraflops"],
        entry["gigabytes_per_second"],
        entry["fraction_of_copy"],
        entry["host_microseconds"],
        *(_joined(entry[key]) for key in ("over", "errors")),
        _joined(targets),
        entry["note"],
    ]


def _joined(values: dict[str, Any] | None) -> str:
    return "; ".join(f"{name} {value}" for name, value in (values or {}).items())
