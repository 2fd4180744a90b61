"""transformers' ``tp_plan="auto"``: every linear layer of a Llama runs in FP8, as on one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_fp8.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.tiers import thorough

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers' tp_plan needs accelerate")


@pytest.mark.parametrize(
    "recipe", [name if name == "delayed" else pytest.param(name, marks=thorough) for name in RECIPES]
)
def test_every_layer_runs_in_fp8(recipe: str, tmp_path: Path) -> None:
    for report in run_on_two_ranks("hf_tensor_parallel", str(tmp_path), recipe, folder=tmp_path):
        cut, alone = report["cut"], report["alone"]
        assert cut["records"] == alone["records"] == [1] * 21
        assert cut["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        assert cut["gradients"] == pytest.approx(alone["gradients"], rel=0.15)
