"""Watch: warnings of delayed scales that do not follow the training. Nothing here is state: no scale depends on it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

PATIENCE = 1000
"""Training forwards without any optimizer step after which a warning says so; more than steps have micro-batches."""

UPDATES_IN_EVAL = 100
"""Updates after which a warning says that the model trains in eval mode."""

UPDATES_OF_OTHERS = 100
"""Updates of a history after each of which it is asked whether none of them updates some slots."""


class Watch:
    """Counts what one history's layers do between its updates, and warns, each time once.

    Attributes:
        patience: as :data:`PATIENCE`; more where a step has many micro-batches.
        stepped: whether an optimizer that owns slots of the history has ever stepped in this process.
        observed: whether a layer observed amaxes since the last training forward began.
        found: whether one did before that, since the last update.
        forwards: training forwards since the last update, as far as they count.
        trained_in_eval: whether weights had gradients taken in eval mode since the last update.
        unobserved_updates: updates in a row that found nothing because of it.
        has_warned_of_eval, has_warned_of_standstill, has_warned_of_others: whether each warning was given.
    """

    patience = PATIENCE

    def __init__(self) -> None:
        self.stepped = self.observed = self.found = self.trained_in_eval = False
        self.forwards = self.unobserved_updates = 0
        self.has_warned_of_eval = self.has_warned_of_standstill = self.has_warned_of_others = False

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()  # copies and pickles have not run yet

    def forward_begins(self, updates: int, training: bool, *, observes: bool = False) -> None:
        """Count the last training forward if it observed amaxes, and warn when there are too many without a step.

        Args:
            updates: how many the history had.
            training: whether a module that uses it is in training mode.
            observes: count it anyway: compiled layers do not set :attr:`observed`.
        """
        self.forwards += self.observed or observes
        self.found |= self.observed
        self.observed = False
        # Once an optimizer has stepped, a step may have any number of micro-batches.
        if self.stepped or self.has_warned_of_standstill or self.forwards < self.patience or not training:
            return
        self.has_warned_of_standstill = True
        warnings.warn(
            f"the FP8 scales stand still: {self.forwards} training forwards since update {updates}, and no "
            "torch.optim.Optimizer that holds parameters of the model has stepped. Step them with one, or after each "
            "step call update_scales() of the plugin, without a plugin update_fp8_scales(model), or take a recipe "
            "without state, recipe='tensorwise'",
            stacklevel=2,
        )

    def updated(self) -> None:
        """Begin to count anew; warn once that updates find no amax because the model trains in eval mode."""
        found = self.observed or self.found
        # Gradients without an optimizer are no training.
        unobserved = self.trained_in_eval and self.stepped and not found
        self.unobserved_updates = 0 if found else self.unobserved_updates + unobserved
        self.observed = self.found = self.trained_in_eval = False
        self.forwards = 0
        if self.unobserved_updates >= UPDATES_IN_EVAL and not self.has_warned_of_eval:
            self.has_warned_of_eval = True
            warnings.warn(
                f"the FP8 layers train in eval mode, in which delayed scaling observes nothing: their scales did not "
                f"follow for {UPDATES_IN_EVAL} updates. Call model.train(), or take a recipe without state, "
                "recipe='tensorwise'",
                stacklevel=2,
            )

    def warn_of_others(self, names: Sequence[str]) -> None:
        """Warn of tensors that are observed and that no optimizer's step updates."""
        self.has_warned_of_others = True
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"the FP8 scales of {', '.join(names[:3])}{more} stand still: their layers have parameters that require "
            "gradients, and no optimizer that has stepped holds one of them. Give them to an optimizer, or freeze them "
            "with requires_grad_(False): they then follow the optimizer of the module around them",
            stacklevel=2,
        )
