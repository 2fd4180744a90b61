"""Watch: warnings about delayed scales that do not follow the model. Scales do not depend on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

PATIENCE = 1000
"""The number of training forwards without an optimizer step before a warning; more than a step has micro-batches."""

UPDATES_IN_EVAL = 100
"""The number of updates before a warning that the model trains in eval mode."""

UPDATES_OF_OTHERS = 100
"""Every so many updates of a history, check for slots that no optimizer updates."""


class Watch:
    """Counts the forwards of a history's layers between updates, and issues each warning once.

    Attributes:
        patience: :data:`PATIENCE`, or more if a step has many micro-batches.
        stepped: whether an optimizer that owns slots of the history has stepped in this process.
        observed: whether a layer has observed amaxes since the beginning of the last training forward.
        found: whether a layer has observed amaxes before that, since the last update.
        forwards: the number of training forwards since the last update that observed amaxes.
        trained_in_eval: whether weights got gradients in eval mode since the last update.
        unobserved_updates: the number of consecutive updates without amaxes because of eval mode.
        weights_loaded: whether ``load_state_dict`` has changed weights of a history with scales, since its last use.
        state_loaded: whether FP8 state was loaded or emptied since the last use.
        has_warned_of_eval, has_warned_of_standstill, has_warned_of_others: whether each warning was issued.
        has_warned_of_weights: the same, since FP8 state was last loaded or emptied.
    """

    patience = PATIENCE

    def __init__(self) -> None:
        self.stepped = self.observed = self.found = self.trained_in_eval = False
        self.forwards = self.unobserved_updates = 0
        self.has_warned_of_eval = self.has_warned_of_standstill = self.has_warned_of_others = False
        self.weights_loaded = self.state_loaded = self.has_warned_of_weights = False

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()  # copies and pickles start anew

    def state_changed(self) -> None:
        """Note that FP8 state was loaded or emptied, before or after the weights that it belongs to."""
        self.state_loaded = True
        self.has_warned_of_weights = False
        self.forwards = 0

    def forward_begins(self, updates: int, training: bool, *, observes: bool = False) -> None:
        """Count the last training forward if it observed amaxes, and warn if there are too many without a step.

        Args:
            updates: the number of the history's updates.
            training: whether a module that uses the history is in training mode.
            observes: True counts the forward even without :attr:`observed`, which compiled layers do not set.
        """
        self.forwards += self.observed or observes
        self.found |= self.observed
        self.observed = False
        # Once an optimizer has stepped, a step may have any number of micro-batches.
        if self.stepped or self.has_warned_of_standstill or self.forwards < self.patience or not training:
            return
        self.has_warned_of_standstill = True
        warnings.warn(
            f"the FP8 scales are not updated: {self.forwards} training forwards since update {updates}, and no "
            "torch.optim.Optimizer that holds parameters of the model has stepped. Use such an optimizer; or call "
            "update_scales() of the plugin, or update_fp8_scales(model) without a plugin, after each step; or use a "
            "recipe without state, recipe='tensorwise'",
            stacklevel=2,
        )

    def updated(self) -> None:
        """Reset the counts, and warn once if updates have no amaxes because the model trains in eval mode."""
        found = self.observed or self.found
        # Gradients without an optimizer are not training.
        unobserved = self.trained_in_eval and self.stepped and not found
        self.unobserved_updates = 0 if found else self.unobserved_updates + unobserved
        self.observed = self.found = self.trained_in_eval = False
        self.forwards = 0
        if self.unobserved_updates >= UPDATES_IN_EVAL and not self.has_warned_of_eval:
            self.has_warned_of_eval = True
            warnings.warn(
                "the FP8 layers train in eval mode, in which delayed scaling observes no amaxes: their scales did not "
                f"change for {UPDATES_IN_EVAL} updates. Call model.train(), or use a recipe without state, "
                "recipe='tensorwise'",
                stacklevel=2,
            )

    def warn_of_others(self, names: Sequence[str]) -> None:
        """Warn about tensors whose amaxes are observed, but whose scales no optimizer updates."""
        self.has_warned_of_others = True
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"the FP8 scales of {', '.join(names[:3])}{more} are not updated: their layers have parameters that "
            "require gradients, and no optimizer that has stepped lately holds one. Add them to an optimizer, or "
            "freeze them with requires_grad_(False): they then follow the optimizer of their parent module",
            stacklevel=2,
        )


def uses_begin(watches: Iterable[Watch]) -> None:
    """Warn once if weights were loaded since the last use of some histories, whose scales are those of other weights.

    Args:
        watches: those of all histories that a region uses; a model may have several.
    """
    stale = []
    for each in watches:
        if each.weights_loaded and not each.state_loaded and not each.has_warned_of_weights:
            stale.append(each)
        each.weights_loaded = each.state_loaded = False
    for each in stale:
        each.has_warned_of_weights = True
    if stale:
        warnings.warn(
            "load_state_dict has changed weights of FP8 layers, whose delayed scales are still those of the weights "
            "before. That is right for weights that are close to these, such as averages. After loading others, call "
            "load_fp8_state_dict(model, state) with the FP8 state that was saved with the weights, or "
            "reset_fp8_scales(model) if there is none, for the module that was loaded: until the scales follow, values "
            "may saturate or become zero. This is said once, also if weights are swapped repeatedly",
            stacklevel=2,
        )
