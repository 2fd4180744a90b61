"""What each recipe would have lost in a run, and the cheapest one within a budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_fp8.monitor.record import Array, Record
from lightning_fp8.ops.sample import LOSSES

FLUSHED_BUDGET = 0.01
"""The largest share of a tensor's nonzero values that may become 0."""

LEAST_DECIBELS = 20.0
"""The least signal to noise of a tensor."""


@dataclass(frozen=True)
class RecipeLoss:
    """What one recipe loses of each cast, in the samples of a run.

    Attributes:
        recipe: its name.
        flushed: the share of nonzero values that become 0, ``[n]``; NaN of a cast that was not sampled.
        decibels: signal to noise, ``[n]``.
        measured: whether the run had this recipe.
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
        """The casts that lose more, the worst first."""
        beyond = (self.flushed > flushed) | (self.decibels < decibels)
        casts = np.flatnonzero(beyond)
        return [int(cast) for cast in casts[np.argsort(-self.flushed[casts], kind="stable")]]

    @property
    def worst(self) -> int | None:
        """The cast that loses the greatest share; None where none was sampled."""
        return int(np.nanargmax(self.flushed)) if self.is_known else None


@dataclass(frozen=True)
class Advice:
    """The recipe to take.

    Attributes:
        recipe: its name; None where nothing was sampled.
        fits: whether it is within the budget; else no recipe is, and this one has the fewest casts over it.
        over: its casts that are over the budget.
    """

    recipe: str | None
    fits: bool
    over: tuple[int, ...] = ()


def measured_loss(record: Record) -> RecipeLoss:
    """What the recipe of the run lost, in its worst interval of each cast, with what it clipped counted as noise."""
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
    """What the recipes that scale a tensor from itself would have lost, the cheapest first."""
    column = {name: index for index, name in enumerate(LOSSES)}
    found = []
    for index, name in enumerate(record.recipes):
        of_recipe = record.losses[:, index]
        nonzero, flushed, signal, noise = (of_recipe[:, column[each]] for each in LOSSES)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(nonzero > 0, flushed / nonzero, np.nan)
            decibels = np.where(signal > 0, 10 * np.log10(signal / noise), np.nan)
        found.append(RecipeLoss(name, share, decibels))
    return found


def cheapest(losses: list[RecipeLoss], flushed: float = FLUSHED_BUDGET, decibels: float = LEAST_DECIBELS) -> Advice:
    """The first of ``losses``, which are in the order of their cost, that is within the budget for every cast."""
    known = [each for each in losses if each.is_known]
    if not known:
        return Advice(None, False)
    for each in known:
        if not each.over(flushed, decibels):
            return Advice(each.recipe, True)
    fewest = min(known, key=lambda each: len(each.over(flushed, decibels)))
    return Advice(fewest.recipe, False, tuple(fewest.over(flushed, decibels)))
