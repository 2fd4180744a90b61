"""What README and docs quote: numbers of the committed comparison, messages of the package."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import fields
from statistics import mean

import pytest

import lightning_fp8
from benchmarks import sensitivity
from benchmarks.measuring import report
from benchmarks.measuring.summary import summary
from lightning_fp8.numerics.recipes import RECIPES
from tests.docs.pages import ROOT


def test_readme_has_the_numbers_of_the_comparison() -> None:
    losses: dict[str, list[float]] = {}
    for name, run in json.loads((ROOT / "docs/compare_recipes.json").read_text())["runs"].items():
        losses.setdefault(name.partition("/")[0], []).append(run["val_loss"])
    bf16 = losses.pop("bf16")
    above = sorted(100 * (mean(each) / mean(bf16) - 1) for each in losses.values())
    pairs = [(loss, baseline) for each in losses.values() for loss, baseline in zip(each, bf16, strict=True)]
    said = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"{above[0]:.2f} to {above[-1]:.2f} % above that of BF16" in said
    assert "and above it in each pair of runs with the same seed" in said
    assert all(loss > baseline for loss, baseline in pairs)


H200 = [
    json.loads((ROOT / f"benchmarks/results/2026-11-{suite}.json").read_text())
    for suite in ("27-h200-models", "26-h200-products", "27-h200-attention", "27-h200-casts", "27-h200-hardware")
]


def test_the_tables_of_a_gpu_are_made_from_its_results() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/h200.md").read_text()
    assert report.insert(readme, summary(H200)) == readme
    assert page.endswith("\n\n".join(map(report.table, H200)) + "\n")


def test_the_table_of_sensitivities_is_made_from_its_results() -> None:
    page = (ROOT / "docs/sensitivity.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/2026-11-26-cpu-sensitivity.json").read_text())
    assert f"\n\n{sensitivity.table(results)}\n\n" in page
    pairs = [(each["ranked"], each["default"]) for each in results["results"]]
    more = sum(ranked["flops_in_fp8"] > default["flops_in_fp8"] + 1e-9 for ranked, default in pairs)
    assert f"in {more} of {len(pairs)} runs more FLOPs" in page
    ratios = sorted(ranked["error"] / default["error"] for ranked, default in pairs)
    assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times" in page
    for block in ("first", "last"):
        places: dict[tuple[str, str], list[float]] = {}
        for each in results["results"]:
            places.setdefault((each["model"], each["recipe"]), []).append(each["positions"][block])
        means = sorted(mean(each) for each in places.values())
        assert f"{means[0]:.2f} to {means[-1]:.2f}" in page


def test_the_cost_of_a_monitor_is_its_results() -> None:
    page = (ROOT / "docs/monitor.md").read_text()
    entries = json.loads((ROOT / "benchmarks/results/2026-11-27-cpu-monitor.json").read_text())["suites"]["monitor"]
    ratios = [
        sorted(1 / ratio for each in entries if each["by"].endswith(kind) for ratio in each["over"].values())
        for kind in (", sampled", ", what if", ", a run")
    ]
    for (least, *_, most), digits in zip(ratios, (2, 2, 3)):
        assert f"{least:.{digits}f} to {most:.{digits}f}" in page


WITH_LIGER = "delayed, fused, Liger's RoPE and loss"
MODELLED = ("BF16", "BF16, Liger", "delayed", "delayed, fused", WITH_LIGER, "blockwise", "blockwise, fused")


def test_the_modelled_step_is_its_file() -> None:
    file = json.loads((ROOT / "benchmarks/results/2026-11-28-modelled-step.json").read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    (section,) = re.findall(r"^## A modelled step$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    heading, _, *rows = (line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|"))
    assert heading[0] == f"step of {file['conditions']}"
    runs = {run["run"]: run for run in file["runs"]}
    assert tuple(row[0] for row in rows) == MODELLED
    for name, measured, modelled, over, ops in rows:
        run = runs[name]
        assert measured == ("–" if run["measured"] is None else f"{run['measured']:.2f}")
        assert (modelled, over) == (f"{run['modelled']:.2f}", f"{run['over BF16, modelled']:.2f}")
        assert ops == str(run["ops"] or "–")
    below = [100 * (1 - run["modelled"] / run["measured"]) for run in runs.values() if run["measured"]]
    assert f"{min(below):.0f} to {max(below):.0f} % below what was measured" in section
    said = re.sub(r"\s+", " ", section)
    ratio = runs["BF16"]["measured"] / runs["delayed"]["measured"]
    assert f"it says {runs['delayed']['over BF16, modelled']} times BF16, where {ratio:.2f} was measured" in said
    over = runs["BF16, Liger"]["modelled"] / runs[WITH_LIGER]["modelled"]
    assert f"against BF16 with Liger-Kernel the row with Liger's RoPE and loss is {over:.2f} times as fast" in said


def test_files_of_results_are_committed() -> None:
    """Each pattern in the table of files matches some, and each file is matched by one."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    (table,) = re.findall(r"^\| files \|.*?\n(.*?)^$", page, re.DOTALL | re.MULTILINE)
    found = set()
    for first in re.findall(r"^\| (.+?) \|", table, re.MULTILINE):
        pattern = "".join(re.findall("`(.+?)`", first)).removeprefix("/")
        folder = ROOT if pattern.startswith("docs/") else ROOT / "benchmarks/results"
        files = set(folder.glob(pattern))
        assert files, pattern
        found |= files
    assert set((ROOT / "benchmarks/results").glob("*.json")) <= found


def texts() -> list[str]:
    """Every text in the sources of the package; of an f-string, what it says before, between and after its values."""
    found = []
    for file in (ROOT / "lightning_fp8").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found.append("".join(map(str, parts)))
    return found


def test_messages_that_are_explained_are_said_by_the_package() -> None:
    page = (ROOT / "docs/trouble.md").read_text()
    (section,) = re.findall(r"^## Messages from this package$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    quoted = [
        quote for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for quote in re.findall("`(.+?)`", row)
    ]
    assert len(quoted) > 20
    said = "\n".join(texts())
    assert not [quote for quote in quoted if quote not in said]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_exported_and_documented(name: str) -> None:
    cls = RECIPES[name].__name__
    assert getattr(lightning_fp8, cls) is RECIPES[name]
    assert cls in lightning_fp8.__all__
    assert f"| `{name}` | `{cls}` |" in (ROOT / "README.md").read_text()
    assert re.search(rf"^\| `{name}` \|.*\| `{cls}` \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    options = {field.name for field in fields(RECIPES[name])} - {"name"}
    assert not [option for option in options if f"`{option}`" not in (ROOT / "docs/recipes.md").read_text()]


@pytest.mark.parametrize("name", [name for name in lightning_fp8.__all__ if name != "__version__"])
def test_every_public_name_is_in_the_api(name: str) -> None:
    assert f"lightning_fp8.{name}\n" in (ROOT / "docs/api.md").read_text()


def test_the_plugins_describe_all_their_arguments() -> None:
    for cls in (lightning_fp8.FP8Precision, lightning_fp8.FP8FabricPrecision):
        doc = inspect.getdoc(cls) or ""
        described = re.findall(r"^    (\w+): ", doc.partition("Args:")[2].partition("Raises:")[0], re.MULTILINE)
        assert described == list(inspect.signature(cls).parameters)
