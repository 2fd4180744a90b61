"""The suites ``emulation`` and ``monitor``, of the same training step: what they run, and what is made of its times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.measuring import report
from benchmarks.measuring.record import Result
from benchmarks.measuring.timing import Times
from lightning_fp8.numerics.recipes import RECIPES
from tests.tiers import thorough


def test_a_dry_run_times_bf16_and_every_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    assert main(["--dry-run", "emulation", "--json", str(tmp_path / "out.json")]) == 0
    assert torch.get_num_threads() == threads
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["arguments"]["only"] == ["emulation"]
    bf16, *others = document["suites"]["emulation"]
    assert (bf16["by"], bf16["over"], bf16["met"]) == ("BF16", None, None)
    assert [entry["by"] for entry in others] == [f"lightning_fp8, {recipe}" for recipe in RECIPES]
    for entry in others:
        ratio = bf16["milliseconds"]["low"] / entry["milliseconds"]["low"]
        assert entry["over"]["BF16"] == pytest.approx(ratio, rel=1e-2)
        assert entry["target"] == {"over BF16": 1 / (1.7 if entry["by"].endswith("mxfp8") else 1.6)}
    assert capsys.readouterr().out.count("training step of a Llama") == 1 + len(RECIPES)


def test_the_table_says_how_many_steps_of_bf16_one_costs() -> None:
    times, slow = Times(0.1, 0.09, 0.11, 9), Times(0.15, 0.12, 0.18, 9)
    entries = [
        Result("step", by, (2, 128), "bfloat16", times=each, over=over, target=target).as_json()
        for by, each, over, target in (
            ("BF16", times, {}, {}),
            ("kept", slow, {"BF16": 0.75}, {"over BF16": 0.625}),
            ("missed", slow, {"BF16": 0.5}, {"over BF16": 0.625}),
        )
    ]
    bf16, kept, missed = report._emulation(entries).splitlines()[2:]
    assert bf16 == "| step | BF16 | 100.0 (90.0 – 110.0) |  |  |"
    assert kept == "| step | kept | 150.0 (120.0 – 180.0) | 1.33 BF16 | ✓ ≤ 1.60 |"
    assert missed == "| step | missed | 150.0 (120.0 – 180.0) | 2.00 BF16 | ✗ ≤ 1.60 |"


@thorough
def test_a_run_with_a_monitor_costs_its_steps_samples_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(["--dry-run", "--only", "monitor", "--json", str(tmp_path / "out.json")]) == 0
    entries = json.loads((tmp_path / "out.json").read_text())["suites"]["monitor"]
    for recipe in ("delayed", "tensorwise", "blockwise"):
        of_recipe = {each["by"].partition(", ")[2]: each for each in entries if each["name"].endswith(f", {recipe}")}
        kinds = ("without a monitor", "following", "sampled", "what if", "report")
        plain, following, sampled, what_if, report = (of_recipe[kind]["milliseconds"]["low"] for kind in kinds)
        more = 50 * following + (sampled - plain) + (what_if - sampled) / 10 + report
        run = of_recipe["a run"]
        assert 1 / run["over"]["without a monitor"] == pytest.approx(1 + more / 50 / plain, rel=1e-3)
        assert run["target"] == {"over without a monitor": 1 / 1.01}
    assert capsys.readouterr().out.count("every 50 steps") == 3
