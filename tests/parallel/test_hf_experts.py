"""Models whose experts transformers divides over ranks (``ep_size``), beside one process that has all of them.

Tokens of an expert come in another order there, so sums are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_ranks
from tests.distributed.scripts.hf_experts import LAYERS, save
from tests.tiers import covering, thorough

KINDS = "Mixtral", "Qwen3Moe", "GptOss"
SIZES = (2, 1, 2), (1, 2, 2), (4, 1, 4), (4, 1, 2), (2, 2, 4)
"""Of a mesh: ranks that have a batch of their own, ranks that share a layer, and ranks that share the experts."""
ROWS = [
    (kind, recipe, *sizes)
    for kind in KINDS  # transformers has no tensor parallelism for the others than Qwen3-MoE
    for recipe in RECIPES
    for sizes in (SIZES if kind == "Qwen3Moe" else SIZES[:1])
]

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None or find_spec("transformers.distributed.expert_parallel") is None,
    reason="transformers' DistributedConfig, of version 5, needs accelerate",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        save(kind, folder)
    return folder


def run(folder: Path, kind: str, recipe: str, sizes: tuple[int, ...], part: str = "train") -> list[Any]:
    mesh = [str(size) for size in sizes]
    return run_on_ranks("hf_experts", str(folder), kind, *mesh, recipe, part, folder=folder, ranks=sizes[0] * sizes[1])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str, str], Any]:
    @cache
    def report(kind: str, recipe: str) -> Any:
        (found,) = run(folder, kind, recipe, (1, 1, 1))
        return found

    return report


def mean(reports: list[Any]) -> float:
    return sum(report["losses"][0] for report in reports) / len(reports)


def distance(found: list[Any], expected: list[Any]) -> float:
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("kind", "recipe", "fsdp", "tp", "ep"), covering(ROWS, lambda row: {row} & {("GptOss", "delayed", 2, 1, 2)})
)
def test_divided_experts(
    kind: str, recipe: str, fsdp: int, tp: int, ep: int, folder: Path, alone: Callable[[str, str], Any]
) -> None:
    reports, expected = run(folder, kind, recipe, (fsdp, tp, ep)), alone(kind, recipe)
    in_bf16 = alone(kind, "none")
    own_scales = recipe not in ("delayed", "tensorwise")  # tokens and experts of a rank have one there
    assert mean(reports) == pytest.approx(expected["losses"][0], rel=1e-3 if own_scales else 1e-2)
    for report in reports:
        assert report["fp8"] == expected["fp8"]
        assert set(report["fp8"].values()) == {1}
        assert sum("experts" in name for name in report["fp8"]) == LAYERS
        assert report["cut"]
        if tp == 1:  # ranks that have the same experts gather them
            linear = report["gathered"] - 2 * LAYERS * (fsdp > ep)
            assert linear >= 0
            assert linear == 4 * LAYERS or recipe in (
                "blockwise",
                "mxfp8",
            )  # of whole blocks
        assert report["names"] == expected["names"]
        assert report["scales"] == reports[0]["scales"]
        for name, gradient in report["gradients"].items():
            if own_scales and tp == 1:
                assert distance(gradient, expected["gradients"][name]) < 0.05, name
            error, of_one = (
                distance(each, in_bf16["gradients"][name]) for each in (gradient, expected["gradients"][name])
            )
            assert error < 1.3 * of_one + 0.01, name
    if recipe == "delayed":
        for name in report["amaxes"]:
            if name.endswith("weight"):  # of which one process reads all, and each rank some
                assert report["amaxes"][name] == expected["amaxes"][name], name


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("delayed", marks=thorough)])
def test_divided_after_the_conversion(recipe: str, folder: Path, alone: Callable[[str, str], Any]) -> None:
    expected = alone("Mixtral", recipe)
    for report in run(folder, "Mixtral", recipe, (1, 2, 2), "before"):
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-3 if recipe == "rowwise" else 1e-2)
        assert report["fp8"] == expected["fp8"]
        assert report["names"] == expected["names"]


@thorough
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 2)])
def test_saved_and_resumed(sizes: tuple[int, ...], recipe: str, folder: Path) -> None:
    for report in run(folder, "Qwen3Moe", recipe, sizes, "resume"):
        assert report["resumed"] == report["straight"]
