"""Models with experts on two processes: as one process trains them, with scales that the ranks share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.tiers import covering

MODELS = "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"
CASES = [(how, MODELS[row % 4], recipe) for how in ("ddp", "fsdp") for row, recipe in enumerate(RECIPES, how == "ddp")]
"""Each recipe, and each model, with each of both."""
DEFAULT = {CASES[0]}  # tests/parallel/test_experts.py has FSDP2


@pytest.mark.parametrize(("how", "name", "recipe"), covering(CASES, lambda case: {case} & DEFAULT))
def test_two_ranks_train_as_one(how: str, name: str, recipe: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    first, second = run_on_two_ranks("expert_models", str(tmp_path), how, name, recipe, folder=tmp_path)
    for one, two, alone in zip(first["losses"], second["losses"], first["alone"]):
        assert (one + two) / 2 == pytest.approx(alone, rel=3e-3)
    assert first["near"] == second["near"] < 0.03  # a token may go to another expert
    assert first["scales"] == second["scales"]
    assert first["scales"]
    if recipe == "delayed":
        assert first["amaxes"][0] != second["amaxes"][0]  # their tokens differ
        for number, (key, scale) in enumerate(first["scales"].items()):  # of the largest of both ranks in all steps
            largest = max(step[number] for rank in (first, second) for step in rank["amaxes"])
            top = 57344 if key.endswith("grad_output") else 448
            assert scale == pytest.approx(top / largest, rel=1e-6), key
