"""Ranks that cut, shard, convert or run a model differently: an error on both that names what each has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("unlike_plans")
    return run_on_two_ranks("unlike_plans", str(folder), folder=folder)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("recipes", "DelayedScaling(", "Float8RowwiseScaling("),
        ("plans", "0.norm1.weight (64,)", "0.attention.q.weight (64, 64)"),
        ("plans_after", "column, sequences cut along dimension 1", "column, whole sequences"),
        ("converted_layers", "0.mlp.up.weight (128, 64), torch.bfloat16, (Shard(dim=0),), in FP8", "in high precision"),
        ("widths", "a piece of the weight of (64, 64)", "a piece of the weight of (128, 64)"),
        ("shards", "gathered with the model (kept=", "gathered with 0 (kept="),
        ("dimensions", "0.attention.q.weight (64, 64), torch.bfloat16, (Shard(dim=0),)", "(Shard(dim=1),)"),
        ("frozen", "in FP8", "(Shard(dim=0),), frozen, gathered with the model"),
        ("precisions", "param_dtype=torch.bfloat16", "param_dtype=torch.float16"),
        ("kept", "(kept=False, ", "(kept=True, "),
        ("regions", "DelayedScaling(", "high precision"),
        ("sharded_layers", "0.attention.q.weight (64, 64), torch.bfloat16, (Shard(dim=0),)", "in high precision"),
    ],
)
def test_both_are_named(case: str, first: str, second: str, said: list[Any]) -> None:
    for of_rank in said:
        assert "rank 0: " in of_rank[case]
        of_first, of_second = of_rank[case].split("; rank 1: ")
        assert first in of_first
        assert second in of_second


def test_ranks_that_gather_codes_share_their_scales(said: list[Any]) -> None:
    for rank, of_rank in enumerate(said):
        assert f"fp8_group has the ranks [{rank}], without [{1 - rank}]" in of_rank["scales"]
