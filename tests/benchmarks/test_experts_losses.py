"""Losses of experts: those that are committed, how they are summarized, and a short training in each recipe."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import experts
from benchmarks.experts import BF16, FLOAT32, HOW, SEEDS, Run, loss_of, summary
from lightning_fp8.numerics.recipes import RECIPES
from tests.tiers import thorough

LIMIT = 0.35
"""Percent of BF16's mean loss over the seeds."""


def committed() -> dict[str, Any]:
    files = sorted((Path(experts.__file__).parent / "results").glob("*-cpu-experts.json"))
    document: dict[str, Any] = json.loads(files[-1].read_text())
    return document


@pytest.mark.parametrize("recipe", RECIPES)
def test_mean_losses_are_near_bf16s(recipe: str) -> None:
    losses = committed()["losses by seed, nats"]
    assert losses.keys() == {*HOW}
    assert {len(of_seeds) for of_seeds in losses.values()} == {SEEDS}
    mean, base = statistics.mean(losses[recipe]), statistics.mean(losses[BF16])
    assert abs(mean / base - 1) * 100 < LIMIT
    assert committed()["mean over BF16's, percent"][recipe] == pytest.approx(100 * (mean / base - 1), abs=0.005)


def test_summary() -> None:
    made = summary({BF16: [2.0, 3.0, 4.0], FLOAT32: [2.0, 3.0, 4.0], "delayed": [2.03, 3.0, 4.0]})
    assert made["mean over BF16's, percent"] == {FLOAT32: 0.0, "delayed": pytest.approx(1 / 3, abs=1e-3)}
    assert made["BF16's standard deviation over seeds, percent"] == pytest.approx(100 / 3, abs=1e-3)


@thorough
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_short_training(recipe: str) -> None:
    pytest.importorskip("transformers", "5.0")
    base, loss = (loss_of(Run(how, 0), steps=30) for how in (BF16, recipe))
    assert base < 5  # of ln 256 = 5.5 at the beginning
    assert abs(loss / base - 1) * 100 < LIMIT
