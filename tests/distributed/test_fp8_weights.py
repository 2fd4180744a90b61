"""Weights of fp8_model_init on two ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_on_two_ranks


def test_ddp_trains_them_and_fully_shard_refuses_them(tmp_path: Path) -> None:
    for report in run_on_two_ranks("fp8_weights", str(tmp_path), folder=tmp_path):
        assert report["broadcast"]
        assert report["alike"]
        assert report["coded"]
        assert report["difference"] < 0.05  # each rank casts its half of the batch by its own amax
        assert "gathers the weights of FP8 layers in FP8 by itself" in report["sharded"]
