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
        recipe: the recipe's name.
        flushed: the share of nonzero values that become 0, ``[n]``; NaN for a cast that was not sampled.
        decibels: the ratio of signal to noise, ``[n]``.
        measured: whether it is the recipe of the run.
    """

    recipe: str
    flushed: Array
    decibels: Array
    measured: bool = False

    @property
    def is_known(self) -> bool:
        """Whether any cast was sampled."""
        return not bool(np.isnan(self.flushed).all())

    def over(self, flushed: float = FLUSHED_BUDGET, decibels: float = LEAST_DECIBELS) -> list[int]:
        """The casts beyond these limits, worst first."""
        beyond = (self.flushed > flushed) | (self.decibels < decibels)
        casts = np.flatnonzero(beyond)
        return [int(cast) for cast in casts[np.argsort(-self.flushed[casts], kind="stable")]]

    @property
    def worst(self) -> int | None:
        """The cast with the largest share; None if no cast was sampled."""
        return int(np.nanargmax(self.flushed)) if self.is_known else None


@dataclass(frozen=True)
class Advice:
    """The recommended recipe.

    Attributes:
        recipe: the recipe's name; None if no cast was sampled.
        fits: whether it is within the budget. If not, no recipe is, and this one has the fewest casts over the budget.
        over: the casts that are over the budget.
    """

    recipe: str | None
    fits: bool
    over: tuple[int, ...] = ()


def measured_loss(record: Record) -> RecipeLoss:
    """The errors of the recipe of the run, in the worst interval of each cast. Clipping counts as noise."""
    n = len(record.names)
    shares = [each.flushed_share for each in record.intervals]
    decibels = [each.decibels for each in record.intervals]
    none = np.full((1, n), np.nan)
    return RecipeLoss(
        record.recipe,
        np.fmax.reduce(np.array(shares or none)),
        np.fmin.reduce(np.array(decibels or none)),
        measured=True,
    )


def what_if_losses(record: Record) -> list[RecipeLoss]:
    """The errors that the recipes without state would have had in the worst what-if sample, cheapest first."""
    return [RecipeLoss(name, *record.losses[:, index].T) for index, name in enumerate(record.recipes)]


def cheapest(losses: list[RecipeLoss], flushed: float = FLUSHED_BUDGET, decibels: float = LEAST_DECIBELS) -> Advice:
    """The first of ``losses``, which are ordered by cost, that is within the budget for every cast."""
    known = [each for each in losses if each.is_known]
    if not known:
        return Advice(None, False)
    for each in known:
        if not each.over(flushed, decibels):
            return Advice(each.recipe, True)
    fewest = min(known, key=lambda each: len(each.over(flushed, decibels)))
    return Advice(fewest.recipe, False, tuple(fewest.over(flushed, decibels)))
