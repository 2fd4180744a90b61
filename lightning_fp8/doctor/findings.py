"""Findings of the doctor, and their text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    OK = "ok"
    WARN = "warn"
    """It works, but not as well as it could."""
    FAIL = "fail"
    """What should work does not."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: was looked at, e.g. ``numba``.
        value: was found.
        verdict: of it.
        way_out: what to do, a command where there is one; empty where there is nothing to do.
    """

    what: str
    value: str
    verdict: Verdict = Verdict.OK
    way_out: str = ""


def line_of(finding: Finding, width: int = 120) -> str:
    """The finding, in lines of at most ``width`` columns unless a word is longer."""
    mark = finding.verdict.value.upper() if finding.verdict is Verdict.FAIL else finding.verdict.value
    head = f"{mark:<5} {finding.what:<22} "
    return textwrap.fill(
        finding.value, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def advice_of(findings: Sequence[Finding]) -> str:
    """The advice of all findings, worst first."""
    order = sorted(
        (finding for finding in findings if finding.way_out), key=lambda finding: finding.verdict is not Verdict.FAIL
    )
    lines = dict.fromkeys(f"do    {finding.way_out}" for finding in order)
    return "\n".join(lines) if lines else "nothing to do"
