"""Blocks that ``parallelize_module`` cuts over two ranks: torch's styles and ours beside one process and float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.distributed.scripts.tensor_parallel import SHAPE, STEPS, WIDTH
from tests.tiers import thorough

LAYERS, BLOCKS = 12, 2
MH = SHAPE[0] * SHAPE[1] * WIDTH
"""Elements of one activation, tokens × width."""

KINDS = "once", "each", "plain"
EVERY = [pytest.param((name, *KINDS), marks=thorough) for name in RECIPES]
cases = pytest.mark.parametrize("case", [("delayed", "once", "plain"), *EVERY], ids="-".join)


@pytest.fixture(scope="module")
def reports_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(case: tuple[str, ...]) -> list[dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp(case[0])
        return run_on_two_ranks("tensor_parallel", str(folder), *case, folder=folder)

    return run


def of_matrices(report: dict[str, Any]) -> float:
    """The mean error of the gradients of weights against float32; those of norms have few elements, and scatter."""
    return mean(error for name, error in report["errors"].items() if name.endswith("weight") and "norm" not in name)


@cases
def test_every_layer_runs_in_fp8_as_on_one_process(case: tuple[str, ...], reports_of: Any) -> None:
    first, second = reports_of(case)
    alone = first["one process"]
    for kind in case[1:]:
        for styles in ("torch", "ours"):
            report = first[f"{kind} {styles}"]
            assert report["records"] == [STEPS] * LAYERS
            assert report["scales"] == second[f"{kind} {styles}"]["scales"]
            assert report["losses"] == pytest.approx(alone["losses"], rel=2e-3)
            assert report["losses"] == second[f"{kind} {styles}"]["losses"]
            if case[0] == "delayed":
                assert min(report["scales"]) > 0
                assert report["scales"] == pytest.approx(alone["scales"], rel=0.2)
            assert report["errors"].keys() == alone["errors"].keys()
            assert of_matrices(report) == pytest.approx(of_matrices(alone), rel=0.05)
            assert of_matrices(report) > 3 * of_matrices(first[f"{kind} bf16"])


@cases
def test_both_styles_give_the_same(case: tuple[str, ...], reports_of: Any) -> None:
    """To the bit, without biases: torch's styles add them before the sum over ranks is rounded, ours behind it."""
    first, _ = reports_of(case)
    for kind in case[1:]:
        by_torch, by_ours = (first[f"{kind} {styles} without biases"] for styles in ("torch", "ours"))
        assert by_torch["losses"] == by_ours["losses"]
        assert by_torch["scales"] == by_ours["scales"]


@cases
def test_transformer_engines_arguments_give_the_same(case: tuple[str, ...], reports_of: Any) -> None:
    """To the bit where ranks have whole sequences; else tokens come in another order, and sums round otherwise."""
    for report in reports_of(case):
        for kind in set(case[1:]) - {"once"}:
            arguments, styles = report[f"{kind} arguments"], report[f"{kind} ours without biases"]
            assert arguments["records"] == [STEPS] * LAYERS
            if kind == "plain":
                assert arguments["losses"] == styles["losses"]
                assert arguments["scales"] == styles["scales"]
            else:
                assert arguments["losses"] == pytest.approx(styles["losses"], rel=1e-3)
                assert arguments["scales"] == pytest.approx(styles["scales"], rel=0.05)


@cases
def test_what_travels_with_sequence_parallelism(case: tuple[str, ...], reports_of: Any) -> None:
    """Bytes of a block in one step: 16 for each token and channel in BF16, 12 where one scale serves a tensor."""
    first, _ = reports_of(case)
    travelled = {
        name: (2 * report["bytes"]["gather"] + report["bytes"]["scatter"]) / (BLOCKS * MH)
        for name, report in first.items()
    }
    one_scale = case[0] in ("delayed", "tensorwise")
    assert travelled["once bf16"] == travelled["once torch"] == 16
    assert travelled["once ours"] == (12 if one_scale else 16)
    if (
        one_scale and "each" in case
    ):  # each layer gathers for itself, twice: q, k, v and up read x, out and down their gradients
        assert travelled["each ours"] == 4 * 2 * 1 + 2 * 1 + 2 * 2 + 4 * 2


@thorough
@pytest.mark.parametrize(
    ("recipe", "kind"), [("delayed", "once"), ("delayed", "each"), ("delayed", "plain"), ("mxfp8", "once")]
)
def test_compiled_blocks_compute_the_same(recipe: str, kind: str, tmp_path: Path) -> None:
    """Each layer that is cut, and each gather of its input, runs outside of the graphs, and nothing else does."""
    for report in run_on_two_ranks("tensor_parallel", str(tmp_path), recipe, "compiled", kind, folder=tmp_path):
        compiled, eager = report["compiled"], report["eager"]
        assert compiled["losses"] == eager["losses"]
        assert compiled["scales"] == eager["scales"]
        outside = LAYERS + (2 * BLOCKS if kind == "once" else 0)
        assert BLOCKS < compiled["graphs"] <= outside + BLOCKS
        for reason in compiled["breaks"]:
            assert "torch.compiler.disable" in reason
            assert "sharded_linear" in reason or "PrepareModuleInput._gathered" in reason


def test_inputs_that_a_cast_must_not_be_kept_for(tmp_path: Path) -> None:
    """Errors against float32 are FP8's, and float32's own for an input that is not gathered in FP8."""
    for found in run_on_two_ranks("dtensor_inputs", str(tmp_path), folder=tmp_path):
        assert max(found["changed_in_place"]) < 0.07
        assert max(found["scaled_apart"]) < 0.07
        first, *others = found["read_by_no_layer"]
        assert first < 0.05
        assert max(others) < 0.005
