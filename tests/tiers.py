"""The default run of the tests covers everything once; ``pytest --thorough`` runs all of them.

Parameters are written once, as stacked ``parametrize``, and what the default run takes of their product is computed:
few rows that together meet every row of every ``parametrize``; with :data:`every_pair` few that meet every pair of rows
of two, and with :data:`every_row` all. Of a list of cases :func:`covering` takes few that meet what is asked for.
:data:`thorough` leaves a test, a file or a row to the thorough run. ``test_tiers.py`` asserts what the default run
meets.
"""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

thorough = pytest.mark.thorough
every_pair = pytest.mark.every_pair
every_row = pytest.mark.every_row
late_rows = pytest.mark.late_rows

MARKERS = (
    "thorough: run by pytest --thorough alone",
    "every_pair: by default, few rows of the product of several parametrize that meet every pair of rows of two",
    "every_row: by default, too, all rows of the product of several parametrize",
    "late_rows(name, rows): parametrize by what rows() gives, which is called when the test is collected; each has"
    " the name of its value",
)

SECONDS_OF_A_TEST, SECONDS_OF_THE_RUN = 10, 600
"""Of processor time, with all child processes: what ``pytest --budget`` allows the default run."""


# --- Which tests ------------------------------------------------------------------------------------------------------


def cover(rows: Sequence[Collection[Hashable]], costs: Sequence[float] | None = None) -> list[int]:
    """Few of ``rows`` that together hold what any of them holds: one after another that which adds most for its cost.

    Returns:
        Their indices, ascending; the same for the same rows.
    """
    missing = {each for row in rows for each in row}
    costs = costs or [1.0] * len(rows)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(missing.intersection(rows[index])) / costs[index])
        chosen.append(best)
        missing.difference_update(rows[best])
    for index in reversed(chosen.copy()):  # what later rows hold, too
        others = [set(rows[other]) for other in chosen if other != index]
        if set(rows[index]) <= set().union(*others):
            chosen.remove(index)
    return sorted(chosen)


def covering(cases: Iterable[T], covered: Callable[[T], Iterable[Hashable]]) -> list[Any]:
    """Rows for ``parametrize``: by default, few of ``cases`` that together meet all that ``covered`` says of any."""
    cases = list(cases)
    chosen = set(cover([frozenset(covered(case)) for case in cases]))
    return [
        case if index in chosen else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough)
        for index, case in enumerate(cases)
    ]


Factor = tuple[tuple[str, int], ...]
"""What a ``parametrize`` or a fixture with parameters gives a row: its names, and which objects they are there."""


def factors(item: pytest.Item) -> set[Factor]:
    """Those of a test."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = [_names(mark) for mark in item.iter_markers("parametrize")]
    fixtures = [(name,) for name in params.keys() - {*itertools.chain(*names)}]
    return {tuple((name, id(params[name])) for name in each) for each in (*names, *fixtures)}


def _names(mark: pytest.Mark) -> tuple[str, ...]:
    names = mark.args[0]
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)


def pairs(item: pytest.Item) -> set[tuple[Factor, ...]]:
    """Of two factors; the factor itself where there is one."""
    found = sorted(factors(item))
    return {*itertools.combinations(found, min(2, len(found)))}


@dataclass(frozen=True)
class Collected:
    """What was collected.

    Attributes:
        tests: all, in order.
        default: those of them that the default run takes.
    """

    tests: list[pytest.Item]
    default: list[pytest.Item]

    def left_out(self) -> list[pytest.Item]:
        default = {*self.default}
        return [item for item in self.tests if item not in default]

    def functions(self) -> dict[str, list[pytest.Item]]:
        """The rows of each test function, by its id."""
        return by_function(self.tests)


COLLECTED = pytest.StashKey[Collected]()


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def collected(items: Sequence[pytest.Item]) -> Collected:
    """``items``, and what the default run takes of them."""
    left = {item for item in items if item.get_closest_marker("thorough")}
    for rows in by_function(item for item in items if item not in left).values():
        if not rows[0].get_closest_marker("every_row"):
            met = pairs if rows[0].get_closest_marker("every_pair") else factors
            chosen = cover([met(row) for row in rows])
            left.update(row for index, row in enumerate(rows) if index not in chosen and met(row))
    return Collected([*items], [item for item in items if item not in left])


def named(items: Iterable[pytest.Item], arguments: Iterable[str], folder: Path) -> Iterator[pytest.Item]:
    """Those of ``items`` that ``arguments`` name as ``file.py::test``, relative to ``folder``."""
    parts = [argument.partition("::") for argument in arguments]
    names = [((folder / path).resolve(), name) for path, _, name in parts if name]
    for item in items:
        path, name = item.path.resolve(), item.nodeid.partition("::")[2]
        if any(path == file and (name == each or name.startswith((f"{each}[", f"{each}::"))) for file, each in names):
            yield item


def part(items: Iterable[T], number: int, of: int, file: Callable[[T], Hashable]) -> list[T]:
    """Those of ``items`` in every ``of``-th file, beginning with file ``number``; all parts together are all items."""
    files: dict[Hashable, int] = {}
    return [item for item in items if files.setdefault(file(item), len(files)) % of == number]


def part_and_parts(text: str) -> tuple[int, int]:
    """``"1/3"`` as numbers.

    Raises:
        ValueError: If the text has another form, or if there is no such part.
    """
    number, of = map(int, text.split("/"))
    if not 0 <= number < of:
        raise ValueError(f"parts of {of} are 0 to {of - 1}, not {number}")
    return number, of


# --- Processor time ---------------------------------------------------------------------------------------------------


def processor_seconds() -> float:
    """Of this process and its children so far, those that still run included where Linux counts them."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    for children in Path("/proc/self/task").glob("*/children"):  # of each thread
        for child in _read(children).split():
            fields = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _read(path: Path) -> str:
    """Nothing where the thread or the process has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
