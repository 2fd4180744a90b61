"""Models with a recipe of their own on two processes: bitwise those of a region, and gathered in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.tiers import covering, thorough

LAYERS = 4


def test_torchaos_function_may_come_before_fully_shard(tmp_path: Path) -> None:
    for report in run_on_two_ranks("pinned", str(tmp_path), "rowwise", "before torchao", folder=tmp_path):
        case = report["before torchao"]
        assert case["losses"]
        assert case["weights"]
        assert case["gathered"][2:] == [LAYERS] * 4  # from the first optimizer step on


@pytest.mark.parametrize("hows", [("ddp", "before", "after"), pytest.param(("before compiled",), marks=thorough)])
@pytest.mark.parametrize("recipe", covering(RECIPES, lambda recipe: {"delayed"} & {recipe}))
def test_ranks_compute_what_they_do_in_a_region(recipe: str, hows: tuple[str, ...], tmp_path: Path) -> None:
    reports = run_on_two_ranks("pinned", str(tmp_path), recipe, *hows, folder=tmp_path)
    for report in reports:
        said = report.pop("said")
        assert all("compiled code keeps it for the backward pass" in each for each in said)
        assert not said or hows == ("before compiled",)
        for how, case in report.items():
            assert case["losses"], how
            assert case["weights"], how
            assert case["scales"], how
            assert case["gathered"][2:] == case["gathered in a region"][2:], how
            assert said or case["gathered"][2:] == [0 if how == "ddp" else LAYERS] * 4, how
        assert "after" not in hows or report["after"]["gathered"][0] == LAYERS
    first, second = reports
    for how, case in first.items():
        assert case["of"] == second[how]["of"]  # of other data
        assert any(case["of"]) is (recipe == "delayed")
        assert case["losses of"] != second[how]["losses of"]
