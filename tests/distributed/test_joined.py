"""Uneven inputs: ``join()`` of DistributedDataParallel, on two processes of which one has fewer batches."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_on_two_ranks


def test_join_refuses_to_reduce_amaxes_and_all_else_works(tmp_path: Path) -> None:
    for rank, report in enumerate(run_on_two_ranks("joined", str(tmp_path), folder=tmp_path)):
        for case in report["refused"].values():
            assert "reduce_amax=False" in case["error"]
            assert not case["iterations"]
        assert "weights_dtype=torch.float32" in report["refused bfloat16"]["error"]
        works = report["works"]
        assert not [name for name, case in works.items() if case["error"]]
        for recipe, losses in report["expected"].items():
            assert works[recipe]["losses"] == losses
        assert [len(works[name]["losses"]) for name in ("own", "own zero", "own plugin")] == [(2, 4)[rank]] * 3
        for allowed in ("throws", "disabled"):
            assert works[allowed] == works["plain"]
