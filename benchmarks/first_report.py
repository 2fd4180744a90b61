"""The report of a first run on a GPU: the outcome of each step, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FINE = "ok", "not for this card"
NOT_DONE = WAITING, LEFT_OUT = "waiting", "left out"
"""Outcomes. The others are failed, hung, and missing (a program is not installed)."""


def report(document: Mapping[str, Any]) -> str:
    """Markdown: a row per step, and what to do next."""
    rows = []
    for place, each in document["steps"].items():
        outcome = each["outcome"] if each["outcome"] in FINE else f"**{each['outcome']}**"
        rows.append(
            f"| {place} | {outcome} | {each['seconds']:.0f} | {each['said'].replace('|', ' ')} | {each['log']} |"
        )
    title = "# First run" + " (dry run: nothing ran on a GPU)" * document["dry_run"]
    head = ["| step | outcome | s | message | log |", "|---|---|---|---|---|"]
    return "\n".join([title, "", *head, *rows, "", "## Next", "", *(f"- {line}" for line in _next(document)), ""])


def _next(document: Mapping[str, Any]) -> Iterator[str]:
    by_outcome: dict[str, list[str]] = {}
    for place, each in document["steps"].items():
        by_outcome.setdefault(each["outcome"], []).append(place)
    if "doctor/doctor" in by_outcome.get("failed", ()):
        yield "Read logs/doctor-doctor.log first: its failures explain most of the rest."
    for place in by_outcome.get("hung", ()):
        yield f"{place} hung: its log ends with the process's stack; the log with traps contains the error."
    if failed := [place for place in by_outcome.get("failed", ()) if place != "doctor/doctor"]:
        again = ",".join(dict.fromkeys(place.split("/")[0] for place in failed))
        yield f"{len(failed)} failed, {failed[0]} first: fix it, then `--stages {again} --again`."
    for place in by_outcome.get("missing", ()):
        yield f"{place} did not run: {document['steps'][place]['said']}."
    if waiting := [*by_outcome.get(WAITING, ()), *by_outcome.get(LEFT_OUT, ())]:
        yield f"{len(waiting)} steps are not done, {waiting[0]} first: run the same command again to continue there."
    if not document["dry_run"] and all(f"{name}/{name}" in by_outcome.get("ok", ()) for name in ("casts", "products")):
        yield "`lightning-fp8 doctor --prove --json proofs.json`."
        yield "Put proofs.json, casts.json, products.json, attention.json into benchmarks/results, named by date."
        yield "`python -m benchmarks table *.json --readme README.md`; `python -m benchmarks choose products.json`."
        yield "For each target that is missed, report what its profile (ncu-*.ncu-rep) shows and what was tried."
