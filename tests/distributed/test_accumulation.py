"""Ranks that accumulate gradients have the amaxes and gradients of one process with the data of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_on_two_ranks
from tests.tiers import thorough


@pytest.mark.parametrize("kinds", [("unused", "sharded"), pytest.param(("ddp",), marks=thorough)], ids=" ".join)
def test_transformer_layers_accumulate_on_ranks_as_in_one_process(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """DDP, DDP of which one rank leaves a layer out, and FSDP2; weights are kept between micro-batches."""
    for report in run_on_two_ranks("accumulation", str(tmp_path), *kinds, folder=tmp_path):
        assert report.keys() == {*kinds}
        for kind, found in report.items():
            assert found["history"], kind
            assert found["gradients"] < 1e-6, (kind, found)
