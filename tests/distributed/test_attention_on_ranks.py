"""FP8 attention on two processes: one scale for all ranks, the same when recomputed, exact resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_two_ranks("attention", str(folder), folder=folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_rows_of_attention_are_the_largest_of_all_ranks(strategy: str, ranks: list[Any]) -> None:
    first, second = (rank[strategy] for rank in ranks)
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_recomputed_and_resumed_it_is_the_same_to_the_bit(strategy: str, ranks: list[Any]) -> None:
    in_fp8 = {"blocks.1", "blocks.1.core", "blocks.2", "blocks.2.core"}
    for rank in ranks:
        report = rank[strategy]
        assert {name for name, ran in report["ran"].items() if ran} == in_fp8
        for what in ("losses", "same amax", "same scales", "weights"):
            assert report[what], what
