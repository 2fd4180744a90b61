"""Models with a recipe of their own, by which their layers run outside every region."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_fp8.arguments import plain
from lightning_fp8.convert.apply import with_gathers
from lightning_fp8.convert.attention_calls.attach import attach, detach
from lightning_fp8.convert.attention_calls.owners import Owner, owner_of
from lightning_fp8.convert.blocks import is_linear
from lightning_fp8.convert.fused.fused import FusedModule
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.convert.summary import ConversionSummary
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.numerics.recipes import Recipe

_ATTRIBUTE = "_fp8_pinned"
"""Holds the :class:`Pinned` of a model, which its copies and pickles have, too."""


@dataclass(frozen=True)
class Pinned:
    """How :func:`lightning_fp8.convert_module` with a ``recipe`` converted a model.

    Attributes:
        context: the context of its layers outside every region.
        policy: which layers stay in high precision.
        history: the state of delayed scaling.
        compares: whether attention compares FP8 with SDPA.
    """

    context: FP8Context
    policy: Policy
    history: AmaxHistory
    compares: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layers."""
        return self.context.recipe

    def summary(self, model: nn.Module) -> ConversionSummary:
        """The table of ``model`` as it is now: adapters rename layers."""
        plan = plan_conversion(model, self.policy, self.context.attention, self.compares)
        return with_gathers(plan.summary, model, self.recipe)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pinned:
        return replace(self, history=copy.deepcopy(self.history, memo), context=copy.deepcopy(self.context, memo))

    def __getstate__(self) -> dict[str, Any]:
        """The state of a pickle, in which the layers say what functions of ``skip`` have decided."""
        policy = self.policy
        if len(policy.globs) < len(policy.skip):  # type: ignore[arg-type]
            policy = replace(policy, skip=(*policy.globs, runs_in_high_precision))
        return {**self.__dict__, "policy": policy}


def pinned_in(model: nn.Module) -> list[tuple[nn.Module, Pinned]]:
    """The modules of ``model``, itself included, that were converted with a recipe of their own, outer ones first."""
    return [(module, vars(module)[_ATTRIBUTE]) for module in model.modules() if _ATTRIBUTE in vars(module)]


def pin(model: nn.Module, pinned: Pinned | None) -> None:
    """Give all of a converted ``model`` the context of ``pinned``; None removes that of earlier calls.

    Layers that were chosen by torchao's function and not pinned since keep theirs.
    """
    model, before = getattr(model, "_orig_mod", model), pinned_in(model)
    for module, _ in before:
        delattr(module, _ATTRIBUTE)
    if pinned is not None:
        setattr(model, _ATTRIBUTE, pinned)
        if pinned.context.attention:
            attach(model)
        pin_again(model)
        return
    modules = [each for each in model.modules() if before or not _is_chosen(each)]
    set_own_context(modules, None)
    for module in modules:
        if isinstance(module, FP8Module) and module.history is not None:
            module.history.pin(None)


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
        histories = [each.history for each in root.modules() if isinstance(each, FP8Module) and each.history]
        for history in histories:  # a conversion of more of the model has made a new one
            history.pin(pinned.recipe)
        setattr(root, _ATTRIBUTE, replace(pinned, history=next(iter(histories), pinned.history)))
    return [pinned for _, pinned in found]


def set_own_context(modules: Iterable[nn.Module], context: FP8Context | None) -> None:
    """Set the context of forwards outside every region; None is high precision."""
    for module in modules:
        for each in (module, owner_of(module)):
            if isinstance(each, (FP8Module, FusedModule, Owner)) and each.own_context is not context:
                each.own_context = context


def _is_chosen(module: nn.Module) -> bool:
    return isinstance(module, FP8Module) and module.own_context is not None and module.own_context.chosen


def runs_in_high_precision(module: nn.Module, name: str) -> bool:
    """A function for ``skip``: whether an earlier conversion has decided so."""
    owner = owner_of(module)
    return not owner.fp8 if owner else is_linear(module) and not (isinstance(module, LinearLayer) and module.fp8)


def attending(recipe: Recipe, attention: bool | Literal["always"]) -> tuple[Recipe, bool]:
    """``recipe`` as ``attention`` of a plugin or a conversion asks, and whether attention compares FP8 with SDPA.

    Raises:
        TypeError: If ``attention`` is not True, False or ``"always"``.
    """
    attention = plain(attention)
    if not isinstance(attention, bool) and not (isinstance(attention, str) and attention == "always"):
        raise TypeError(f"attention={attention!r} must be True, False or 'always'")
    compares = attention is True and not FP8Context(recipe).attention
    return (replace(recipe, fp8_dpa=True) if attention else recipe), compares
