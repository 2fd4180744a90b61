"""A Llama that transformers cuts (``tp_plan``) and shards (``fsdp_size``): every linear layer runs in FP8.

Products are counted by the dispatcher, not by the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_ranks
from tests.distributed.scripts.hf_parallel import LAYERS, save
from tests.tiers import covering, thorough

LINEARS = 7 * LAYERS
SIZES = (1, 2), (2, 1), (2, 2)
"""Of a mesh: ranks that share a batch, and ranks that share a layer."""

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers.distributed") is None,
    reason="transformers' DistributedConfig, of version 5, needs accelerate",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder)
    return folder


def run(folder: Path, fsdp: int, tp: int, door: str, recipe: str) -> list[Any]:
    return run_on_ranks("hf_parallel", str(folder), str(fsdp), str(tp), door, recipe, folder=folder, ranks=fsdp * tp)


def check(reports: list[Any], alone: Any) -> None:
    losses = [report["loss"] for report in reports]
    assert sum(losses) / len(losses) == pytest.approx(alone["loss"], rel=2e-3)
    for report in reports:
        # Forward, and the gradients of x and of the weight; others are those of the head.
        assert report["products"] == {"fp8": 3 * LINEARS, "others": 3}
        assert report["records"] == [1] * LINEARS
        assert report["dtensors"] > 0
        assert report["gradients"] == pytest.approx(alone["gradients"], rel=0.15)
    assert alone["products"] == {"fp8": 3 * LINEARS, "others": 3}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], Any]:
    """One process's report by recipe."""

    @cache
    def report(recipe: str) -> Any:
        (found,) = run(folder, 1, 1, "loop", recipe)
        return found

    return report


@pytest.mark.parametrize(
    ("recipe", "fsdp", "tp"),
    covering([(recipe, *sizes) for recipe in RECIPES for sizes in SIZES], lambda row: {row} & {("delayed", 2, 2)}),
)
def test_cut_or_sharded_or_both(recipe: str, fsdp: int, tp: int, folder: Path, alone: Callable[[str], Any]) -> None:
    check(run(folder, fsdp, tp, "loop", recipe), alone(recipe))


@thorough
@pytest.mark.parametrize(("fsdp", "tp"), SIZES)
def test_under_the_trainer(fsdp: int, tp: int, folder: Path, alone: Callable[[str], Any]) -> None:
    reports = run(folder, fsdp, tp, "trainer", "delayed")
    check(reports, alone("delayed"))
    assert all(report["summary"] == LINEARS for report in reports)
