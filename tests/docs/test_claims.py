"""What README and docs quote: numbers of the committed comparison, messages of the package."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import fields
from statistics import mean
from typing import Any

import pytest

import lightning_fp8
from benchmarks import sensitivity
from benchmarks.measuring import charts, report
from benchmarks.measuring.record import OURS
from benchmarks.measuring.sheet import sheet
from benchmarks.measuring.summary import summary
from lightning_fp8.doctor.report import VARIABLES
from lightning_fp8.numerics.recipes import RECIPES
from tests.docs.pages import ROOT


def losses_of(comparison: str) -> dict[str, list[float]]:
    """Of each run of a comparison, its validation losses by seed; files have runs in the order in which they ended."""
    losses: dict[str, list[float]] = {}
    for name, run in sorted(json.loads((ROOT / f"docs/{comparison}.json").read_text())["runs"].items()):
        other_data = ", other data" if "order" in name else ""
        losses.setdefault(name.partition("/")[0] + other_data, []).append(run["val_loss"])
    return losses


def test_readme_has_the_losses_of_the_comparisons_and_their_spread() -> None:
    said = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    of_gpu, of_cpu = losses_of("compare_width_512_seeds"), losses_of("compare_recipes")
    assert {len(losses) for losses in (*of_gpu.values(), *of_cpu.values())} == {3}
    for losses, sentence in (
        (of_gpu, "BF16's own seeds spread over {spread:.1f} % (largest minus smallest)"),
        (of_cpu, "where BF16's seeds spread over {spread:.1f} %"),
    ):
        bf16 = losses["bf16"]
        assert sentence.format(spread=100 * (max(bf16) - min(bf16)) / mean(bf16)) in said
    above = {name: 100 * (mean(losses) / mean(of_gpu["bf16"]) - 1) for name, losses in of_gpu.items()}
    columns = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
    columns |= {"delayed+attention": "delayed with FP8 attention", "bf16, other data": "BF16 on other data"}
    assert set(columns) == set(above) - {"bf16"}
    heading = " | ".join(columns.values())
    numbers = " | ".join(f"{mean(of_gpu[name]):.4f}, {above[name]:+.2f} %" for name in columns).replace("-", "−")
    assert f"| BF16 | {heading} | |---|---|---|---|---|---| | {mean(of_gpu['bf16']):.4f} | {numbers} |" in said
    cpu = sorted(100 * (mean(losses) / mean(of_cpu["bf16"]) - 1) for name, losses in of_cpu.items() if name != "bf16")
    assert f"{cpu[0]:.2f} to {cpu[-1]:.2f} % above BF16" in said
    pairs = [pair for name in set(of_cpu) - {"bf16"} for pair in zip(of_cpu[name], of_cpu["bf16"], strict=True)]
    assert all(loss > baseline for loss, baseline in pairs)
    assert "in each pair of runs with the same seed" in said
    attention = zip(of_gpu["delayed+attention"], of_gpu["bf16"], strict=True)
    assert all(loss > baseline for loss, baseline in attention)
    assert "with FP8 attention all three are above it" in said


RESULTS = ROOT / "benchmarks/results"
H200_FILES = [
    RESULTS / f"2026-11-{suite}.json"
    for suite in ("27-h200-models", "26-h200-products", "27-h200-attention", "27-h200-casts", "27-h200-hardware")
]
H200 = [json.loads(path.read_text()) for path in H200_FILES]


def test_the_table_of_readme_is_made_from_a_gpus_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert report.insert(readme, summary(H200)) == readme


def test_the_tables_of_a_gpu_are_made_from_its_results() -> None:
    page = (ROOT / "docs/h200.md").read_text()
    for path, document in zip(H200_FILES, H200):
        assert path.with_suffix(".csv").read_text() == sheet(document)
        assert f"[CSV](../{path.with_suffix('.csv').relative_to(ROOT)}) | [JSON](../{path.relative_to(ROOT)})" in page


def test_the_charts_of_a_gpu_show_its_results() -> None:
    page = (ROOT / "docs/h200.md").read_text()
    for name, numbers in charts.charts(H200).items():
        assert charts.numbers_in(ROOT / f"docs/h200_{name}.png") == numbers
        assert f"](h200_{name}.png)" in page


def test_the_start_page_says_what_its_results_say() -> None:
    said = re.sub(r"\s+", " ", (ROOT / "docs/index.md").read_text())
    training = charts.charts(H200)["training"]
    steps = [ratio for name, values in training.items() if "step" in name for ratio in values.values()]
    layers = [ratio for name, values in training.items() if "step" not in name for ratio in values.values()]
    assert f"training steps {min(steps):.2f} to {max(steps):.2f}" in said
    assert f"linear layers {min(layers):.2f} to {max(layers):.2f}" in said
    losses = losses_of("compare_width_512_seeds")
    bf16 = losses.pop("bf16")
    above = [100 * (mean(each) / mean(bf16) - 1) for name, each in losses.items() if "other data" not in name]
    assert f"{min(above):+.2f} to {max(above):+.2f} %".replace("-", "−") in said
    assert f"seeds spread over {100 * (max(bf16) - min(bf16)) / mean(bf16):.1f} %" in said


def test_the_page_of_a_gpu_is_short_and_says_what_its_results_say() -> None:
    page = (ROOT / "docs/h200.md").read_text()
    assert len(page.splitlines()) <= 120
    said = re.sub(r"\s+", " ", page)
    of_steps = [ratio for values in list(charts.charts(H200)["training"].values())[:1] for ratio in values.values()]
    assert f"{min(of_steps):.2f} to {max(of_steps):.2f} times as fast as BF16 in eager mode" in said
    steps = {entry["by"].removeprefix(f"{OURS}, "): entry["milliseconds"] for entry in H200[0]["suites"]["models"]}
    took = {by: milliseconds["median"] for by, milliseconds in steps.items()}
    ratio = f"{took['BF16, compiled'] / took['delayed']:.2f}"
    assert f"than which `delayed` in eager mode is {ratio} times as fast ({took['delayed']:.1f} and" in said
    assert f"{took['BF16, compiled']:.1f} ms; compiled it takes {took['delayed, compiled']:.1f} ms)" in said
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"than which *eager* `delayed` is {ratio} times as fast" in readme
    whole_ops = [
        (entry["name"].split(",")[0], *entry["shape"][1::2], "keys" in entry["name"], entry["over"]["cuDNN (BF16)"])
        for entry in H200[2]["suites"]["attention"]
        if entry["by"] == OURS and entry["over"]
    ]

    def between(each: str, lengths: set[int], channels: set[int], shared_heads: bool = True) -> str:
        ratios = [
            ratio
            for name, length, width, shared, ratio in whole_ops
            if name == each and length in lengths and width in channels and (shared_heads or not shared)
        ]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times"

    every = {2048, 4096, 8192, 16_384, 32_768}
    assert f"the forward pass is {between('forward', {2048}, {64, 128, 256}, False)} as fast" in said
    assert f"slower at all lengths, {between('backward', every, {64})} as fast" in said
    assert f"128 or 256 channels: {between('forward', {16_384}, {128, 256})} forward" in said
    assert f"the backward pass is {between('backward', every, {128})} as fast" in said
    assert f"with 256 channels {between('backward', every, {256})}" in said


def test_the_page_of_a_gpu_says_what_its_gemms_and_casts_did() -> None:
    said = re.sub(r"\s+", " ", (ROOT / "docs/h200.md").read_text())
    fastest: dict[tuple[object, ...], dict[str, Any]] = {}
    estimated: list[float] = []
    for entry in H200[1]["suites"]["products"]:
        if entry["by"].startswith(OURS) and entry["correct"] and entry["milliseconds"] and entry["over"]:
            work = entry["name"], *entry["shape"]
            if entry["by"] == OURS:
                estimated += [1 / ratio for by, ratio in entry["over"].items() if by.startswith("torch._scaled_mm")]
            if entry["over"]["BF16"] > fastest.get(work, {"over": {"BF16": 0}})["over"]["BF16"]:
                fastest[work] = entry

    def of(library: str, works: list[dict[str, Any]]) -> str:
        over = [(by, ratio) for entry in works for by, ratio in entry["over"].items()]
        times = [1 / ratio for by, ratio in over if by.startswith(library)]
        return f"{min(times):.2f} to {max(times):.2f} of the time of"

    (added,) = (entry for entry in fastest.values() if "added" in entry["name"])
    others = [entry for entry in fastest.values() if entry is not added]
    of_torch, of_cublaslt = of("torch._scaled_mm", others), of("cuBLASLt", [*fastest.values()])
    assert f"{of_torch} `torch._scaled_mm`, and {of_cublaslt} cuBLASLt's" in said
    of_added = f"{1 / added['over']['torch._scaled_mm (full)']:.2f}"
    assert f"takes {of_added} of the time of `torch._scaled_mm`. The tile" in said
    assert f"estimated time takes up to {max(estimated):.2f} of its time" in said
    casts: dict[str, list[float]] = {}
    for entry in H200[3]["suites"]["casts"]:
        if entry["by"] == OURS and entry["fraction_of_copy"] and entry["shape"] != [8192, 8200]:
            casts.setdefault(entry["name"], []).append(entry["fraction_of_copy"])

    def shares(*starts: str) -> str:
        found = [share for name, each in casts.items() if name.startswith(starts) for share in each]
        return f"{100 * min(found):.0f} to {100 * max(found):.0f} %"

    assert f"given scales move {shares('cast')} of a copy's" in said
    assert f"twice {shares('current', 'row')}. Norms with a cast move {shares('RMSNorm + ', 'LayerNorm + ')}" in said
    assert f"gradients of RMSNorm {shares('RMSNorm backward')}." in said


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


def variables(*patterns: str) -> set[str]:
    """The environment variables of this package that files name."""
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return {name for path in files for name in re.findall(r"LIGHTNING_FP8_[A-Z][A-Z_]*[A-Z]", path.read_text())}


def test_all_environment_variables_are_on_the_page_about_installation() -> None:
    """The first table has what the package reads, which doctor prints, and the last one what only tests read."""
    page = (ROOT / "docs/installation.md").read_text()
    (section,) = re.findall(r"^## Environment variables$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    of_package, _, of_tests = (
        set(re.findall(r"`(LIGHTNING_FP8_\w+)`", part)) for part in section.split("| variable |")[1:]
    )
    in_package = variables("lightning_fp8/**/*.py", "cuda_kernels/**/*.py")
    assert of_package == in_package
    assert of_tests == variables("tests/**/*.py", "benchmarks/**/*.py", "examples/*.py", ".ci/run") - in_package
    assert in_package == {name for name in VARIABLES if name.startswith("LIGHTNING_FP8_")}
    assert {name for name in VARIABLES if not name.startswith("LIGHTNING_FP8_")} <= set(re.findall(r"`(\w+)`", section))


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
