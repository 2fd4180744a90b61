"""FP8 attention on two processes: one scale for all ranks, the same when recomputed, exact resume."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks
from tests.tiers import thorough


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp2", marks=thorough)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_two_ranks("attention", str(folder), request.param, folder=folder)


def test_rows_of_attention_are_the_largest_of_all_ranks(ranks: list[Any]) -> None:
    first, second = ranks
    assert first["scales"] == second["scales"]
    assert len(first["amax"]) == 4
    for role in ("qkv", "o", "dqkv", "do"):
        row = first["names"].index(f"blocks.1.core.{role}")
        ours, others = ([amax[row] for amax in rank["amax"]] for rank in (first, second))
        assert ours != others, "their data differ"
        assert min(ours + others) > 0
        most = 57344 if role.startswith("d") else 448
        largest = max(map(max, zip(ours, others)))  # all four steps are in the window
        assert first["scales"][-1][row] == pytest.approx(most / largest, rel=1e-6)
    for role in ("s", "dp"):  # their tensors never lie in memory
        row = first["names"].index(f"blocks.1.core.{role}")
        assert not any(amax[row] for amax in first["amax"])


def test_recomputed_and_resumed_it_is_the_same_to_the_bit(ranks: list[Any]) -> None:
    in_fp8 = {"blocks.1", "blocks.1.core", "blocks.2", "blocks.2.core"}
    for report in ranks:
        assert {name for name, ran in report["ran"].items() if ran} == in_fp8
        for what in ("losses", "same amax", "same scales", "weights"):
            assert report[what], what
