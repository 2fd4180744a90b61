"""Watch: warnings about delayed scales that do not follow the model. Scales do not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from lightning_fp8.notices import say_once

EVAL, STANDSTILL, WEIGHTS = "eval", "standstill", "weights"
"""The keys of the warnings."""

PATIENCE = 1000
"""The number of training forwards without an optimizer step before a warning; more than a step has micro-batches."""

UPDATES_IN_EVAL = 100
"""The number of updates before a warning that the model trains in eval mode."""


class Watch:
    """Counts the forwards of a history's layers between updates, and issues each warning once.

    Attributes:
        patience: :data:`PATIENCE`, or more if a step has many micro-batches.
        stepped: whether an optimizer of the model has stepped in this process.
        observed: whether a layer has observed amaxes since the beginning of the last training forward.
        found: whether a layer has observed amaxes before that, since the last update.
        forwards: the number of training forwards since the last update that observed amaxes.
        trained_in_eval: whether weights got gradients in eval mode since the last update.
        unobserved_updates: the number of consecutive updates without amaxes because of eval mode.
        weights_loaded: whether ``load_state_dict`` has changed weights of a history with scales, since its last use.
        state_loaded: whether FP8 state was loaded or emptied since the last use.
        lead: the slot of the layer whose forwards begin those of a model with a context of its own; None is the next.
        said: the warnings that were issued; that of weights until FP8 state is loaded or emptied.
    """

    patience = PATIENCE

    def __init__(self) -> None:
        self.stepped = self.observed = self.found = self.trained_in_eval = False
        self.forwards = self.unobserved_updates = 0
        self.weights_loaded = self.state_loaded = False
        self.lead: int | None = None
        self.said: dict[Hashable, str] = {}

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()  # copies and pickles start anew

    def state_changed(self) -> None:
        """Note that FP8 state was loaded or emptied, before or after the weights that it belongs to."""
        self.state_loaded = True
        self.said.pop(WEIGHTS, None)
        self.forwards, self.lead = 0, None

    def forward_begins(self, updates: int, trains: Callable[[], bool], observes: bool = False) -> None:
        """Count the last training forward if it observed amaxes, and warn if there are too many without a step.

        Args:
            updates: the number of the history's updates.
            trains: returns whether a module that uses the history is in training mode.
            observes: True counts the forward even without :attr:`observed`, which compiled layers do not set.
        """
        self.forwards += self.observed or observes
        self.found |= self.observed
        self.observed = False
        # Once an optimizer has stepped, a step may have any number of micro-batches.
        if self.stepped or self.forwards < self.patience or not trains():
            return
        say_once(
            self.said,
            f"the FP8 scales are not updated: {self.forwards} training forwards since update {updates}, and no "
            "torch.optim.Optimizer that holds parameters of the model has stepped. Use such an optimizer; or call "
            "update_scales() of the plugin, or update_fp8_scales(model) without a plugin, after each step; or use a "
            "recipe without state, recipe='tensorwise'",
            STANDSTILL,
        )

    def updated(self) -> None:
        """Reset the counts, and warn once if updates have no amaxes because the model trains in eval mode."""
        found, self.lead = self.observed or self.found, None
        # Gradients without an optimizer are not training.
        unobserved = self.trained_in_eval and self.stepped and not found
        self.unobserved_updates = 0 if found else self.unobserved_updates + unobserved
        self.observed = self.found = self.trained_in_eval = False
        self.forwards = 0
        if self.unobserved_updates >= UPDATES_IN_EVAL:
            say_once(
                self.said,
                "the FP8 layers train in eval mode, in which delayed scaling observes no amaxes: their scales did not "
                f"change for {UPDATES_IN_EVAL} updates. Call model.train(), or use a recipe without state, "
                "recipe='tensorwise'",
                EVAL,
            )


def uses_begin(watches: Iterable[Watch]) -> None:
    """Warn once if weights were loaded since the last use of some histories, whose scales are those of other weights.

    Args:
        watches: those of all histories that a region uses; a model may have several.
    """
    stale = []
    for watch in watches:
        if watch.weights_loaded and not watch.state_loaded and WEIGHTS not in watch.said:
            stale.append(watch)
        watch.weights_loaded = watch.state_loaded = False
    for watch in stale[1:]:
        watch.said[WEIGHTS] = "by the first"
    if stale:
        say_once(
            stale[0].said,
            "load_state_dict has changed weights of FP8 layers, whose delayed scales are still those of the weights "
            "before. That is right for weights that are close to these, such as averages. After loading others, call "
            "load_fp8_state_dict(model, state) with the FP8 state that was saved with the weights, or "
            "reset_fp8_scales(model) if there is none, for the module that was loaded: until the scales follow, values "
            "may saturate or become zero. This is said once, also if weights are swapped repeatedly",
            WEIGHTS,
        )
