"""Declared versions are those that ran, and no version is told from another by its text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tiers import thorough

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
ROOMS = ("lightning_fp8", "cuda_kernels", "tests", "examples", "benchmarks")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _says_a_version(node: ast.expr) -> bool:
    """Whether ``node`` is a version's text: what a package says of itself, or what its metadata says of it."""
    match node:
        case ast.Attribute(attr="__version__"):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="version")):
            return True
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)):
            return name in ("version", "python_version")
        case ast.Subscript():
            return any(isinstance(part, ast.Constant) and part.value == "versions" for part in ast.walk(node))
    return False


def _compared_texts(source: str) -> list[int]:
    """Lines of ``source`` that ask whether a version's text equals another."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any(isinstance(operator, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for operator in node.ops)
        and any(map(_says_a_version, (node.left, *node.comparators)))
    ]


@pytest.mark.parametrize(
    "comparison",
    [
        "torch.__version__ == text",
        "text != numba.__version__",
        'importlib.metadata.version("torch") == "2.14.1"',
        'version("torch") in supported',
        'torch.version.cuda == "13.0"',
        'document["versions"]["torch"] == text',
    ],
)
def test_compared_texts_are_seen(comparison: str) -> None:
    assert _compared_texts(f"if a and {comparison}:\n    pass") == [1]


def test_compared_versions_are_let_through() -> None:
    assert not _compared_texts("Version(torch.__version__).release == (2, 9, 0) and torch.version.cuda is None")


def test_no_version_is_compared_as_text() -> None:
    """One release has many texts: torch's metadata says 2.14.1 where ``torch.__version__`` says 2.14.1+cu130."""
    found = {str(path.relative_to(ROOT)): _compared_texts(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def _oldest_run() -> dict[str, Version]:
    """Distribution to the version that CI runs at the oldest, from ``.ci/oldest.txt``."""
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in pinned)
    return {canonicalize_name(pin.name): Version(str(pin.specifier)[2:]) for pin in pinned}


def _declared() -> list[Requirement]:
    """What the package and its extras require, other than itself."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def test_each_lower_bound_is_the_version_that_ci_runs() -> None:
    bounds = {
        (canonicalize_name(requirement.name), Version(bound.version))
        for requirement in _declared()
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    run = _oldest_run()
    assert {(name, run.get(name)) for name, _ in bounds} == bounds


def test_whatever_is_imported_has_a_lower_bound() -> None:
    """Programs that are only started on a developer's machine may be any."""
    unbounded = {r.name for r in _declared() if not any(bound.operator == ">=" for bound in r.specifier)}
    assert unbounded <= {"build", "pre-commit", "furo", "myst-parser", "sphinx"}


@thorough
def test_kernels_compile_with_a_numpy_that_has_no_row_stack() -> None:
    """As NumPy 2.5, which Numba 0.68 takes and whose missing name ends numba-cuda 0.30.4."""
    code = """
import numpy
vars(numpy).pop("row_stack", None)
from cuda_kernels.lowering import compiler
from cuda_kernels.casts.column_sums import column_sums_kernel
assert compiler.ltoir(column_sums_kernel("float32"), "90a")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
