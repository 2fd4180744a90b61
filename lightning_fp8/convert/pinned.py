"""Models with a recipe of their own, by which their layers run outside every region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_fp8.convert.apply import with_gathers
from lightning_fp8.convert.attention_calls.attach import attach, detach, note_unpickled
from lightning_fp8.convert.attention_calls.owners import Owner, owner_of
from lightning_fp8.convert.blocks import is_linear
from lightning_fp8.convert.fused.fused import FusedModule
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory, living
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe

_ATTRIBUTE = "_fp8_pinned"
"""Holds the :class:`Pinned` of a model, which its copies and pickles have, too."""


@dataclass(frozen=True)
class Pinned:
    """How :func:`lightning_fp8.convert_module` with a ``recipe`` converted a model.

    Attributes:
        context: the context of its layers outside every region.
        policy: which layers stay in high precision.
        history: the state of delayed scaling.
    """

    context: FP8Context
    policy: Policy
    history: AmaxHistory

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layers."""
        return self.context.recipe

    def summary(self, model: nn.Module) -> ConversionSummary:
        """The table of ``model`` as it is now: adapters rename layers."""
        plan = plan_conversion(model, self.policy, self.context.attention)
        return with_gathers(plan.summary, model, self.recipe)

    def __getstate__(self) -> dict[str, Any]:
        """The state of copies and pickles, in which layers say what functions of ``skip`` have decided."""
        globs = self.policy.globs
        kept = len(globs) == len(self.policy.skip)  # type: ignore[arg-type]
        return {**vars(self), "policy": self.policy if kept else replace(self.policy, skip=(*globs, is_kept))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.context.attention:
            note_unpickled(self.history)


def pinned_in(model: nn.Module) -> list[tuple[nn.Module, Pinned]]:
    """The modules of ``model``, itself included, that were converted with a recipe of their own, outer ones first."""
    return [(module, vars(module)[_ATTRIBUTE]) for module in model.modules() if _ATTRIBUTE in vars(module)]


def pin(model: nn.Module, pinned: Pinned | None) -> None:
    """Give all of a converted ``model`` the context of ``pinned``; None removes that of earlier calls.

    Layers that torchao's function chose, and that were not pinned since, keep theirs.
    """
    model, before = getattr(model, "_orig_mod", model), pinned_in(model)
    for module, _ in before:
        delattr(module, _ATTRIBUTE)
    if pinned is None:
        layers = [] if before else [each for each in model.modules() if isinstance(each, FP8Module)]
        kept = {each for each in layers if each.own_context is not None and each.own_context.chosen}
        set_own_context((each for each in model.modules() if each not in kept), None)
        return
    setattr(model, _ATTRIBUTE, pinned)
    if pinned.context.attention:
        attach(model)
    pin_again(model)


def pin_again(model: nn.Module, detached: bool = False) -> list[Pinned]:
    """Give the modules of pinned parts of ``model``, which may be new, their contexts, and return what was pinned.

    Args:
        detached: a plugin has detached its attention from them.
    """
    found = pinned_in(model)
    for root, pinned in found:
        if detached and pinned.context.attention:
            detach(root)
            attach(root)
        set_own_context(root.modules(), pinned.context)
        histories = (each.history for each in root.modules() if isinstance(each, FP8Module) and each.history)
        setattr(root, _ATTRIBUTE, replace(pinned, history=next(histories, pinned.history)))
    return [pinned for _, pinned in found]


def set_own_context(modules: Iterable[nn.Module], context: FP8Context | None) -> None:
    """Set the context of forwards outside every region; None is high precision."""
    histories: dict[AmaxHistory, None] = {}
    for module in modules:
        for each in (module, owner_of(module)):
            if isinstance(each, (FP8Module, FusedModule, Owner)) and each.own_context is not context:
                each.own_context = context
        if isinstance(module, FP8Module) and module.history is not None:
            histories[module.history] = None
    for history in histories:  # other modules that use it may have other contexts
        own = (getattr(each, "own_context", None) for each in living(history.modules))
        history.pin(next((each.recipe for each in own if each and isinstance(each.recipe, DelayedScaling)), None))


def is_kept(module: nn.Module, name: str) -> bool:
    """A function for ``skip``: whether an earlier conversion keeps ``module`` in high precision."""
    owner = owner_of(module)
    return not owner.fp8 if owner else is_linear(module) and not (isinstance(module, LinearLayer) and module.fp8)
