"""ModelParallelStrategy (FSDP2) on two processes: FP8 layers inside sharded blocks, exact resume, both file formats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_two_ranks("model_parallel", str(folder), folder=folder)


@pytest.mark.parametrize("sharded", ["blocks", "linears"])
@pytest.mark.parametrize("file", ["full", "sharded"])
def test_trains_and_resumes_bit_for_bit(file: str, sharded: str, ranks: list[Any]) -> None:
    first, second = (rank[f"{file} {sharded}"] for rank in ranks)
    assert first["scales"] == second["scales"]
    for report in (first, second):
        assert report["losses"]
        assert report["differs_without_state"] is (True if file == "full" else None)  # a folder's is not taken out
        assert report["weights"]
        assert report["count"] == 4
        assert report["falls"]
        assert report["num_fp8"] == report["converted"] == 4  # two blocks of two; the linear layer after them is a head
        assert report["scales"] == report["straight_scales"]
        assert min(report["scales"]) > 0
        assert report["is_folder"] == (file == "sharded")
        assert report["classes"] == (["FSDPLinear"] if sharded == "linears" else ["Linear"])
