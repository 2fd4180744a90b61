"""FSDP2 that gathers the weights of experts in FP8, beside itself gathering them in BF16, and beside one process.

Losses, weights and scales are equal to the bit. Bytes are those that torch.distributed is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_on_ranks, run_on_two_ranks
from tests.tiers import thorough

RECIPES = "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"
WIDTH, EXPERTS, HIDDEN, BLOCKS, STEPS = 256, 4, 128, 2, 4
"""Of the experts whose weights are codes."""

pytest.importorskip("transformers")


def run(part: str, folder: Path, *options: str) -> list[Any]:
    return run_on_two_ranks("experts", str(folder), part, *options, folder=folder)


def is_equal(report: dict[str, Any]) -> bool:
    return bool(report["losses"] and report["weights"] and report["scales"])


@thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_the_gather_in_bf16_and_half_of_its_bytes(recipe: str, tmp_path: Path) -> None:
    """Scales of rows and blocks are those of an expert: no rank asks another one for amaxes."""
    for report in run("recipe", tmp_path, recipe):
        assert report.keys() == {"mixtral", "gpt_oss"}
        for kind, case in report.items():
            assert is_equal(case), kind
            assert 0.5 < case["bytes"] <= 0.52, kind
            assert case["more_calls"] == ({"allreduce_": 1} if recipe == "tensorwise" else {}), kind


@thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_one_process(recipe: str, tmp_path: Path) -> None:
    """For several orders of conversion and sharding, with recomputation in one of them."""
    for report in run("alone", tmp_path, recipe):
        assert len(report) == 8
        for order, case in report.items():
            assert is_equal(case), order
            assert case["gathered"] == 4, order


@thorough
def test_replicas_of_shards(tmp_path: Path) -> None:
    for report in run_on_ranks("experts", str(tmp_path), "replicas", folder=tmp_path, ranks=4):
        assert report.keys() == {*RECIPES}
        for recipe, case in report.items():
            assert is_equal(case), recipe
            assert case["bytes"] < 0.53, recipe


@thorough
def test_other_sizes_and_policies(tmp_path: Path) -> None:
    uneven = "its 5 experts are not divided evenly over 2 ranks"
    for report in run("options", tmp_path):
        table = report["5 experts, mxfp8"].pop("table")
        assert table == {f"{i}.experts.{name}_proj": uneven for i in range(2) for name in ("gate_up", "down")}
        for name, case in report.items():
            assert is_equal(case), name
            in_bf16 = name in ("5 experts, rowwise", "5 experts, blockwise", "5 experts, mxfp8", "kept mxfp8")
            assert len(case["said"]) == in_bf16, name
            if in_bf16:
                assert f"4 because {uneven if '5' in name else 'reshard_after_forward=False'}" in case["said"][0], name
            # From the second forward on, weights that are read in high precision, too, are gathered in BF16.
            assert (case["bytes"] > 0.53) == (in_bf16 or "within" in name), name


def test_ranks_without_experts_and_experts_without_tokens(tmp_path: Path) -> None:
    for report in run("unlike", tmp_path):
        for name, case in report.items():
            assert is_equal(case), name
            assert (case["bytes"] > 0.53) == (name == "within"), name


@thorough
def test_compiled_blocks(tmp_path: Path) -> None:
    for report in run("compiled", tmp_path, "delayed,blockwise,mxfp8"):
        for name, case in report.items():
            assert case["losses"], name
            assert case["weights"], name
            assert case["gathered"] == (0 if "mxfp8" in name else 4), name


def test_codes_of_a_checkpoint_are_sent_as_they_are(tmp_path: Path) -> None:
    weights = BLOCKS * EXPERTS * 3 * WIDTH * HIDDEN
    for report in run("codes", tmp_path):
        for name, case in report.items():
            assert case["losses"], name
            assert case["weights"], name
            assert case["kept"], name
            assert case["trained"] == 3 * BLOCKS
            gathers = STEPS * (1 if "False" in name else 2)
            assert 1 < case["sent"] / (gathers * weights // 2) < 1.01, name


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_trainer_saves_and_resumes(recipe: str, tmp_path: Path) -> None:
    first, second = run("trainer", tmp_path, recipe)
    assert first == second
    for case in first.values():
        assert case["losses"]
        assert case["weights"]
        assert case["scales"][0] == case["scales"][1]
        assert min(case["scales"][0]) > 0 or recipe != "delayed"
        assert case["num_fp8"] == case["gathered"] > 0
