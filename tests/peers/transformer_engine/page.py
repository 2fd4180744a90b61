"""The tables of ``docs/transformer_engine_calls.md``, which are the data of these tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/transformer_engine_calls.md"


@cache
def rows(heading: str) -> list[tuple[str, str]]:
    """Both cells of each row under ``## heading``."""
    _, found, text = PAGE.read_text().partition(f"\n## {heading}\n")
    assert found, heading
    lines = [line for line in text.partition("\n#")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(left, right) for left, right, *_ in cells]


def sentences() -> list[str]:
    """What is said where a call is refused."""
    return [right for _, right in rows("Refused")]


def core_sentences() -> dict[str, str]:
    """What is said of Transformer Engine's internals, by kind."""
    return {left.strip("`"): right for left, right in rows("Internals")}
