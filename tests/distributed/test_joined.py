"""Uneven inputs: ``join()`` of DistributedDataParallel, on two processes of which one has fewer batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fp8 import FP8FabricPrecision
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


@pytest.mark.usefixtures("one_rank")
def test_join_of_one_rank_works_in_the_plugin() -> None:
    """No other rank has inputs that could end before or after its own."""
    plugin = FP8FabricPrecision()
    model = DistributedDataParallel(plugin.convert_module(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))))
    with model.join(), plugin.forward_context():
        model(torch.randn(4, 32)).square().mean().backward()
