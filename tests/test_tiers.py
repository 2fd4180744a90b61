"""How the default run is chosen, and what it covers of the tests that this run has collected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cuda_kernels.kernel import Kernel
from lightning_fp8.numerics.recipes import RECIPES
from tests import tiers
from tests.cuda_kernels.cases.all_cases import kernels_of_case
from tests.cuda_kernels.emulated import builders

ROOT = Path(__file__).parents[1]
PRODUCTS_OF = ("attention", "modules", "ops", "recipes", "transformer")
AXES = {"recipe", "layout", "dtype", "float8", "qkv_format", "activation", "make", "kind", "module"}
"""Rooms in which the default run meets every value of these parameters, in one test or another."""


@pytest.fixture
def found(request: pytest.FixtureRequest) -> tiers.Collected:
    return request.config.stash[tiers.COLLECTED]


def room(item: pytest.Item) -> str:
    return item.nodeid.split("/")[1]


def values(items: Iterable[pytest.Item]) -> set[tuple[str, str]]:
    """Of all parameters, by their text; of what has its address there, without it."""
    calls = (item.callspec.params.items() for item in items if hasattr(item, "callspec"))
    return {(name, repr(value).partition(" at 0x")[0]) for params in calls for name, value in params}


# --- The choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "costs", "chosen"),
    [
        ([{1}, {2}, {1, 2}], None, [2]),
        ([{1}, {1}, {2}], None, [0, 2]),
        ([{1, 2}, {2, 3}, {3, 4}, {4, 5}], None, [0, 2, 3]),
        ([{1}, {2}, {1, 2}], [1, 1, 3], [0, 1]),
        ([set(), set()], None, []),
    ],
)
def test_few_rows_hold_all(rows: list[set[int]], costs: list[float] | None, chosen: list[int]) -> None:
    assert tiers.cover(rows, costs) == chosen


def test_parts_share_no_file_and_are_all() -> None:
    items = [f"{file}::{test}" for file in "abcde" for test in range(3)]
    parts = [tiers.part(items, number, 3, lambda item: item[0]) for number in range(3)]
    assert sorted(each for part in parts for each in part) == items
    assert [{each[0] for each in part} for part in parts] == [{"a", "d"}, {"b", "e"}, {"c"}]


@pytest.mark.parametrize("text", ["3/3", "-1/3", "1", "a/b", "1/2/3", "0/0"])
def test_no_other_parts(text: str) -> None:
    assert tiers.part_and_parts("2/3") == (2, 3)
    with pytest.raises(ValueError):
        tiers.part_and_parts(text)


EXAMPLE = """
import pytest
from tests.tiers import covering, every_pair, every_row, thorough

AXES = [pytest.mark.parametrize(name, values) for name, values in (("a", [1, 2, 3]), ("b", "xy"), ("c", [False, True]))]

@AXES[0]
@AXES[1]
@AXES[2]
def test_values(a, b, c): pass

@every_pair
@AXES[0]
@AXES[1]
@AXES[2]
def test_pairs(a, b, c): pass

@every_row
@AXES[0]
@AXES[2]
def test_rows(a, c): pass

@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@AXES[2]
def test_one_list(a, b, c): pass

@pytest.mark.parametrize("case", covering(["ax", "ay", "bx"], set))
def test_cases(case): pass

@pytest.mark.parametrize(("name", "number"), covering([("a", 1), ("a", 2), ("b", 1)], lambda row: row[0]))
def test_tuples(name, number): pass

@thorough
def test_thorough(): pass

def test_slow():
    import time
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
"""
OTHER = """
import pytest
from tests.tiers import thorough

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_other(a, b): pass

@thorough
def test_more(): pass
"""
PLUGIN = """
from tests import tiers
tiers.SECONDS_OF_A_TEST = 0.2
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the tests of EXAMPLE, with other limits."""
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "limits.py").write_text(PLUGIN)
    path = f"{tmp_path}:{ROOT}"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        plugins = ("-p", "limits", "-p", "tests.conftest", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", *plugins, "--rootdir", ".", *options]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )

    return run


@tiers.thorough
def test_the_default_run(run: Callable[..., Any]) -> None:
    done = run("--budget")
    passed = [line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line]
    names = "test_values", "test_pairs", "test_rows", "test_one_list"
    of = {name: [each for each in passed if each.startswith(name)] for name in names}
    assert {word for each in of["test_values"] for word in each[12:-1].split("-")} == {*"123xy", "False", "True"}
    assert len(of["test_values"]) == 3
    assert 6 <= len(of["test_pairs"]) <= 8
    assert len(of["test_rows"]) == 3 * 2
    assert len(of["test_one_list"]) == 4, "what is written as one list is not taken apart"
    assert passed[sum(map(len, of.values())) :] == [
        "test_cases[ay]", "test_cases[bx]", "test_tuples[a-1]", "test_tuples[b-1]", "test_slow",
    ]  # fmt: skip
    assert f"{12 + 12 + 6 + 8 + 3 + 3 + 2 - len(passed)} tests are left to pytest --thorough" in done.stdout
    assert "s; 0.2 s allowed: test_example.py::test_slow" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


@tiers.thorough
def test_the_thorough_run_and_what_is_named(run: Callable[..., Any]) -> None:
    done = run("--thorough")
    assert done.returncode == pytest.ExitCode.OK, "only --budget fails a slow run"
    assert "46 passed" in done.stdout
    assert "left to" not in done.stdout


@tiers.thorough
@pytest.mark.parametrize(
    ("options", "passed"),
    [
        (("test_example.py::test_thorough",), 1),
        pytest.param(
            ("./test_example.py::test_values[False-x-1]", "test_example.py::test_cases"), 4, marks=tiers.thorough
        ),
        # of the other file 2 of 5, as by default
        (("test_example.py::test_thorough", "test_other.py"), 3),
        (("-m", "thorough"), 4),
        (("--left-out", "test_other.py"), 3),
        (("--left-out", "--part", "0/2", "test_other.py", "test_example.py"), 3),
        (("-m", "not thorough", "test_other.py"), 2),
    ],
)
def test_what_is_asked_for(options: tuple[str, ...], passed: int, run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(OTHER)
    assert f"{passed} passed" in run(*options).stdout


def test_a_part_alone_is_refused(run: Callable[..., Any]) -> None:
    done = run("--part", "0/2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--part is of --left-out; pass both, or neither" in done.stderr


# --- What it covers ---------------------------------------------------------------------------------------------------


def test_every_value_of_every_parameter_is_met(found: tiers.Collected) -> None:
    """Where rows of a product are left out: every value, or every pair of values."""
    kept = tiers.by_function(found.default)
    for name, rows in found.functions().items():
        rows = [row for row in rows if not row.get_closest_marker("thorough")]
        if rows:
            assert values(rows) == values(kept[name]), name
        if rows and rows[0].get_closest_marker("every_pair"):
            assert {pair for row in rows for pair in tiers.pairs(row)} == {
                pair for row in kept[name] for pair in tiers.pairs(row)
            }, name


def test_every_file_has_tests_in_the_default_run(found: tiers.Collected) -> None:
    """So each module, callback, command and strategy has; but for runs of packages that a newcomer lacks."""
    optional = {item.path for item in found.tests if item.path.name in ("test_trl.py", "test_example.py")}
    assert {item.path for item in found.tests} - optional == {item.path for item in found.default} - optional


@pytest.mark.parametrize("of", PRODUCTS_OF)
def test_a_rooms_parameters_have_every_value(of: str, found: tiers.Collected) -> None:
    missing = values(item for item in found.tests if room(item) == of)
    missing -= values(item for item in found.default if room(item) == of)
    assert not {(name, value) for name, value in missing if name in AXES}


def test_every_recipe_trains_every_module(found: tiers.Collected) -> None:
    of_modules = [item for item in found.default if room(item) == "modules"]
    if of_modules:
        assert {("recipe", repr(name)) for name in RECIPES} <= values(of_modules)


def test_every_kernel_is_compiled_and_run(found: tiers.Collected) -> None:
    compiled = [
        item.callspec.params
        for item in found.default
        if item.nodeid.startswith("tests/machine_code/test_comp") and hasattr(item, "callspec")
    ]
    launched = [item.callspec.params.get("case") for item in found.default if item.name.startswith("test_case[")]
    if not compiled or not launched or len({room(item) for item in found.default}) < 15:
        pytest.skip("the whole suite covers them")
    gate = [params for params in compiled if "kernel" in params]
    assert {params["arch"] for params in gate} == {"90a", "89", "100", "120"}
    assert {"gemm", "mma_gemm"} <= {params["kernel"].function.__name__ for params in gate}
    kernels = [kernel for case in launched for kernel in kernels_of_case(case)]
    assert {kernel.function.__name__ for kernel in kernels} == builders()
    assert {folder_of(params["kernel"]) for params in gate} == {folder_of(kernel) for kernel in kernels}


def folder_of(kernel: Kernel) -> str:
    """The package of a kernel's source."""
    return kernel.function.__module__.rpartition(".")[0]
