"""ModelParallelStrategy (FSDP2) on two processes: FP8 layers inside sharded blocks, exact resume, both file formats,
parameters that are made on meta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_on_two_ranks
from tests.tiers import thorough


def run(part: str, folder: Path) -> list[Any]:
    return run_on_two_ranks("model_parallel", str(folder), part, folder=folder)


@thorough
@pytest.mark.parametrize("sharded", ["blocks", "linears"])
@pytest.mark.parametrize("file", ["full", "sharded"])
def test_trains_and_resumes_bit_for_bit(file: str, sharded: str, tmp_path: Path) -> None:
    first, second = run(f"{file} {sharded}", tmp_path)
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


@thorough
def test_weights_as_they_are(tmp_path: Path) -> None:
    """Without FP8 layers equal to Lightning's own plugin; with them it differs a little, in the same dtypes."""
    for report in run("dtypes", tmp_path):
        assert len(report) == 4
        for case, found in report.items():
            dtype = case.split()[0]
            assert found["same"], case
            assert found["moments"] == [dtype]
            assert found["precision"] == {"torch.float32": "bf16-mixed", "torch.bfloat16": "bf16-true"}[dtype]
            assert found["num_fp8"] == 4
            assert found["losses"][0] != found["losses"][1] == pytest.approx(found["losses"][0], rel=0.1)


def test_a_model_made_on_meta_is_filled_and_trains(tmp_path: Path) -> None:
    first, second = run("meta", tmp_path)
    for name, deviation in first["deviations"].items():
        if name.endswith("layer_norm_weight"):
            expected = (1, 0)
        elif name.endswith("weight") and name.startswith(("net.layer", "net.mlp", "net.split")):
            expected = (0, 0.023)
        elif name.startswith(("net.plain", "net.head")):  # torch.nn.Linear's: uniform within a quarter
            expected = (0, 0.25 / 3**0.5)
        else:
            expected = (0, 0)  # biases, and offsets of the softmax
        few = name.endswith("bias")  # values: 4 at least, whose mean deviates by half of what each does
        assert first["means"][name] == pytest.approx(expected[0], abs=(1.5 if few else 0.25) * expected[1]), name
        assert deviation == pytest.approx(expected[1], rel=0.8 if few else 0.2), name
    assert first["num_fp8"] == 7  # all linear layers but the head
    assert first["losses"][-1] < 0.7 * first["losses"][0]
    for key in ("means", "deviations", "scales"):
        assert first[key] == second[key]
    assert min(first["scales"][6:]) > 0  # behind those of attention, which runs in high precision
