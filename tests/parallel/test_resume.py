"""Training on a mesh of ranks that is saved and resumed, by Trainer and Fabric, and by another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_on_ranks
from tests.distributed.scripts.resume import BATCH, EPOCHS, ROWS
from tests.tiers import thorough

LAYERS = 12
STEPS = ROWS // BATCH


def run(folder: Path, door: str, sizes: tuple[int, int], file: str, load: str, save: str) -> list[Any]:
    options = [door, *map(str, sizes), file, load, save]
    return run_on_ranks("resume", str(folder), *options, folder=folder, ranks=sizes[0] * sizes[1])


@pytest.mark.parametrize("file", ["full", "sharded"])
@pytest.mark.parametrize(
    "sizes",
    [(2, 1), (1, 2), pytest.param((2, 2), marks=thorough)],
    ids=["FSDP2", "TP", "FSDP2 and TP"],
)
@pytest.mark.parametrize("door", ["trainer", "fabric"])
def test_a_resumed_training_is_that_of_one_run(door: str, sizes: tuple[int, int], file: str, tmp_path: Path) -> None:
    """Losses, weights and scales, to the bit."""
    reports = run(tmp_path, door, sizes, file, "exactly", "half")
    for report in reports:
        straight = report["straight"]
        assert report["half"] + report["losses"] == straight["losses"]
        assert len(report["losses"]) == STEPS
        assert report["weights"]
        assert report["scales"] == straight["scales"] == reports[0]["scales"]
        assert min(report["scales"]) > 0
        assert straight["records"] == [STEPS * EPOCHS] * LAYERS
        assert report["gathered in fp8"] == (LAYERS if sizes[0] > 1 else 0)
        assert report["is a folder"] == (file == "sharded")


@thorough
@pytest.mark.parametrize("file", ["full", "sharded"])
@pytest.mark.parametrize("door", ["trainer", "fabric"])
def test_other_numbers_of_processes_go_on(door: str, file: str, tmp_path: Path) -> None:
    """Two, then four, then one: as one process that does it all, but for what sums in another order round."""
    losses, scales = [], []
    for epoch, sizes in enumerate([(1, 2), (2, 2), (1, 1)], 1):
        reports = run(tmp_path, door, sizes, file, f"file{epoch - 1}" if epoch > 1 else "-", f"file{epoch}")
        losses += [sum(each) / len(each) for each in zip(*(report["losses"] for report in reports))]
        scales.append(reports[0]["scales"])
        assert all(report["scales"] == scales[-1] for report in reports)
        assert all(report["records"] == [STEPS] * LAYERS for report in reports)
    alone, its_scales = [], []
    for epoch in (1, 2, 3):
        (report,) = run(tmp_path, door, (1, 1), file, f"alone{epoch - 1}" if epoch > 1 else "-", f"alone{epoch}")
        alone += report["losses"]
        its_scales.append(report["scales"])
    assert len(losses) == 3 * STEPS
    assert losses == pytest.approx(alone, rel=0.01)
    assert losses[-1] < 0.7 * losses[0]
    for mine, its in zip(scales, its_scales):
        for role in (0, 1):  # inputs and weights; the gradient of a mean depends on the rows of a rank
            assert mine[role::3] == pytest.approx(its[role::3], rel=0.1)
