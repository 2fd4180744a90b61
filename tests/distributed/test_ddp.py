"""DDP on two processes: ranks share their scales by one collective per optimizer step, and resume to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.checkpoint.te_models import expected_rows, lightning_checkpoints
from tests.distributed.launch import run_on_two_ranks, run_script
from tests.tiers import covering, thorough


def run(part: str, folder: Path) -> list[Any]:
    return run_on_two_ranks("ddp", str(folder), part, folder=folder)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=thorough), 2])
def test_ranks_share_scales_by_one_collective_per_step(accumulate: int, tmp_path: Path) -> None:
    first, second = run(f"scales {accumulate}", tmp_path)
    steps = 4 // accumulate
    assert first["steps"] == second["steps"] == steps
    assert len(first["amax"]) == steps
    for one, two in zip(first["amax"], second["amax"]):
        assert one != two  # their data differ
    assert first["scales"] == second["scales"]
    assert len(first["scales"]) == 4
    # 448 / max over the ranks, for the first step's input of the first FP8 layer
    largest = max(first["amax"][0][0], second["amax"][0][0])
    assert first["scales"][accumulate - 1][0] == pytest.approx(448 / largest, rel=1e-6)
    for rank in (first, second):
        assert rank["updates"] == [["all_gather", "all_reduce"], *[["all_reduce"]] * (steps - 1)]  # names, once
        assert rank["more_than_bf16"] == {"all_reduce": steps, "all_gather": 1}


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=thorough)])
def test_ranks_monitor_by_one_collective_per_report(recipe: str, tmp_path: Path) -> None:
    first, second = run(f"monitored {recipe}", tmp_path)
    assert first["same"]
    assert second["same"]
    assert first["more"] == second["more"] == {"all_gather": 2}
    assert first["intervals"] == second["intervals"]
    assert (first["saved"], second["saved"]) == (True, False)
    for number, interval in enumerate(first["intervals"]):
        steps = slice(4 * number, 4 * number + 4)
        losses = [*first["losses"][steps], *second["losses"][steps]]
        assert interval["loss"] == pytest.approx(sum(losses) / 8, rel=1e-5)
        assert interval["casts"] == [2] * 6  # one of each rank
        for name, elements, updates in zip(first["names"], interval["elements"], interval["updates"]):
            assert elements == 2 * (32 * 32 if name.endswith("weight") else 16 * 32)
            assert updates == (4 if recipe == "delayed" else 0)


@pytest.mark.parametrize(
    "part",
    covering(
        [*(f"resume {recipe}" for recipe in RECIPES), "resume_ours delayed"],
        lambda part: {"resume delayed"} & {part},
    ),
)
def test_resume_is_bit_for_bit(part: str, tmp_path: Path) -> None:
    assert run(part, tmp_path) == [{"losses": True, "weights": True, "count": 4}] * 2


@thorough
def test_transformer_engines_files_resume(tmp_path: Path) -> None:
    (tmp_path / "te").mkdir()
    written = lightning_checkpoints(tmp_path / "te")
    for report in run("te_resume te", tmp_path):
        assert report.keys() == written.keys()
        for version, result in report.items():
            expected = {name: float(scale) for name, (scale, _) in expected_rows(written[version][0]["states"]).items()}
            scales = result.pop("scales")
            assert len(scales) == 6
            assert scales == {name: expected[name] for name in scales}, version
            assert result == {"losses": True, "weights": True, "count": 6}, version


@thorough
def test_steps_that_lightning_does_not_see(tmp_path: Path) -> None:
    first, second = run_on_two_ranks("raw", str(tmp_path), folder=tmp_path)
    assert first == second  # the same scales from other data, and no rank waits for a collective of another
    amax_history = first["trainer"]["amax_history"]
    assert all(amax > 0 for row in amax_history[-4:] for amax in row)  # two epochs of two batches on each rank
    assert not any(amax for row in amax_history[:-4] for amax in row)
    for model in first["plain"]:
        assert all(scale > 0 for scale in model["scale"])
        assert all(amax > 0 for row in model["amax_history"][-4:] for amax in row)
    assert first["plain"][0]["reduced"] == 2 * 4  # a collective for each step


@thorough
def test_models_that_wait_for_a_collector_on_one_rank_alone(tmp_path: Path) -> None:
    """A loop over models, as for folds or trials: ranks would reduce amaxes of other models together, or wait."""
    assert run_on_two_ranks("cycles", str(tmp_path), folder=tmp_path) == [[2, 2, 2]] * 2


@thorough
def test_processes_that_the_trainer_starts_share_scales(tmp_path: Path) -> None:
    failed = run_script("spawned", (str(tmp_path),), [{}])
    assert not failed, failed
    first, second, parent = (json.loads((tmp_path / f"{who}.json").read_text()) for who in ("0", "1", "parent"))
    assert first == second
    assert first["updates"] == {"model": 4}
    assert len(first["scales"]["model"]) == 6  # three tensors of each of two layers
    assert all(scale > 0 for scale in first["scales"]["model"])
    assert parent["weights"] == first["weights"]  # which is all that comes back
