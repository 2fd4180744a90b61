"""The errors that each recipe would have in a run, and the cheapest recipe within a budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_fp8.monitor.record import Array, Record

FLUSHED_BUDGET = 0.01
"""The largest share of a tensor's nonzero values that may become 0."""

LEAST_DECIBELS = 20.0
"""The least signal to noise of a tensor."""


@dataclass(frozen=True)
class RecipeLoss:
    """The errors of one recipe in each cast, in its worst sample of a run.

    Attributes:
        flushed: the share of nonzero values that become 0, ``[n]``; NaN for a cast that was not sampled.
        decibels: the ratio of signal to noise, ``[n]``.
    """

    recipe: str
    flushed: Array
    decibels: Array

    @property
    def is_known(self) -> bool:
        """Whether any cast was sampled."""
        return not bool(np.isnan(self.flushed).all())

    def over_budget(self) -> list[int]:
        """The casts over the budget, worst first."""
        casts = np.flatnonzero((self.flushed > FLUSHED_BUDGET) | (self.decibels < LEAST_DECIBELS))
        return [int(cast) for cast in casts[np.argsort(-self.flushed[casts], kind="stable")]]


def measured_loss(record: Record) -> RecipeLoss:
    """The errors of the recipe of the run, in the worst interval of each cast. Clipping counts as noise."""
    none = [np.full(len(record.names), np.nan)]
    shares = [each.flushed_share for each in record.intervals] or none
    decibels = [each.decibels for each in record.intervals] or none
    return RecipeLoss(record.recipe, np.fmax.reduce(np.array(shares)), np.fmin.reduce(np.array(decibels)))


def what_if_losses(record: Record) -> list[RecipeLoss]:
    """The errors that the recipes without state would have had in the worst what-if sample, cheapest first."""
    return [RecipeLoss(name, *record.losses[:, index].T) for index, name in enumerate(record.recipes)]


def cheapest(losses: list[RecipeLoss]) -> RecipeLoss | None:
    """The first of ``losses``, ordered by cost, with the fewest casts over the budget; None if no cast was sampled."""
    known = [each for each in losses if each.is_known]
    return min(known, key=lambda each: len(each.over_budget()), default=None)
