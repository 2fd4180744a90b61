"""One linear layer that is cut over two ranks: results against float64, and what travels."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_fp8.numerics.recipes import RECIPES
from tests.distributed.launch import run_on_two_ranks
from tests.distributed.scripts.parallel_linear import SHAPE, K, N

ONE_SCALE = ("delayed", "tensorwise")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("parallel_linear")
    return run_on_two_ranks("parallel_linear", str(folder), folder=folder)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("name", RECIPES)
def test_errors_are_those_of_one_process(name: str, mode: str, reports: Any) -> None:
    for report in reports:
        for sequence in (None, 0, 1):
            assert report[f"{name} {mode} {sequence}"]["errors"] == pytest.approx(report[name], rel=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_what_travels(name: str, reports: Any) -> None:
    """FP8 where one scale serves a tensor: x is gathered twice, dy once, each for 1 byte an element."""
    tokens = SHAPE[0] * SHAPE[1] // 2  # of a rank's piece
    for rank in reports:
        column, row = (rank[f"{name} {mode} 1"] for mode in ("column", "row"))
        gathered_x, gathered_dy = (each["bytes"]["gather"] for each in (column, row))
        if name in ONE_SCALE:
            assert (gathered_x, gathered_dy) == (2 * tokens * K, tokens * N)
        else:
            scales = {"rowwise": 4, "blockwise": 4 * K // 128, "mxfp8": K // 32}[name]
            assert (gathered_x, gathered_dy) == (tokens * (K + scales) + 2 * tokens * K, 2 * tokens * N)
        assert column["bytes"]["scatter"] == 2 * 2 * tokens * K
        assert row["bytes"]["scatter"] == 2 * 2 * tokens * N
        sums = [name in ONE_SCALE, 1 + (name in ONE_SCALE)]  # an amax: no scale yet, or none kept; and the row's bias
        assert [each["calls"]["sum"] for each in (column, row)] == sums
