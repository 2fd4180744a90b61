"""Which recipe is advised, by losses written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_fp8.monitor.advice import RecipeLoss, cheapest, measured_loss, what_if_losses
from tests.monitor.recorded import baseline, record


def loss(recipe: str, *flushed: float, decibels: float = 30.0) -> RecipeLoss:
    return RecipeLoss(recipe, np.array(flushed), np.full(len(flushed), decibels))


def advised(*losses: RecipeLoss) -> str | None:
    found = cheapest(list(losses))
    return None if found is None else found.recipe


def test_the_cheapest_within_the_budget_is_advised() -> None:
    assert advised(loss("a", 0.02, 0.0), loss("b", 0.01, 0.005), loss("c", 0.0, 0.0)) == "b"
    assert advised(loss("a", 0.0, decibels=19), loss("b", 0.0)) == "b"


def test_where_none_fits_the_one_with_the_fewest_casts_over_it_is_advised() -> None:
    fewest = loss("b", 0.02, 0.0, 0.9)
    assert advised(loss("a", 0.5, 0.6, 0.7), fewest, loss("c", 0.1, 0.2, 0.3)) == "b"
    assert fewest.over_budget() == [2, 0]


def test_without_samples_none_is_advised() -> None:
    assert advised(loss("a", np.nan)) is None
    assert advised(*what_if_losses(baseline())) is None
    assert not measured_loss(baseline()).is_known


def test_losses_are_those_of_the_record() -> None:
    run = record()
    measured = measured_loss(run)
    shares = np.stack([each["flushed"] / 4000 for each in run.intervals])
    np.testing.assert_array_equal(measured.flushed, shares.max(0))
    assert measured.decibels.tolist() == pytest.approx([30.0] * 9)
    assert [each.recipe for each in what_if_losses(run)] == ["tensorwise", "rowwise", "blockwise", "mxfp8"]
    assert [each.flushed[0] for each in what_if_losses(run)] == [0.025, 0.00625, 0.0015625, 0.000390625]
