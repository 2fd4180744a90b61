"""The FP8 state of a whole model as one dictionary, for training without Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import require_module
from lightning_fp8.delayed.history import (
    STATE_VERSION,
    AmaxHistory,
    Span,
    saved_choice,
    saved_span,
    saved_steps,
    span_in,
    span_of,
    span_ratio,
    validated_state,
)
from lightning_fp8.delayed.update import decide_where_faster, update
from lightning_fp8.modules.base import FP8Module
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.names import clean_name
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.numerics.scaling import FLOAT32_MAX


def fp8_modules(model: nn.Module) -> list[tuple[str, FP8Module]]:
    """The FP8 modules of ``model`` with their clean names, without duplicates."""
    return [(clean_name(name), module) for name, module in model.named_modules() if isinstance(module, FP8Module)]


def names_of_fp8_weights(model: nn.Module) -> set[str]:
    """The clean names of the weights of the FP8 layers of ``model``."""
    layers = [(name, each) for name, each in fp8_modules(model) if isinstance(each, LinearLayer) and each.fp8]
    return {f"{name}.{own}" if name else own for name, each in layers for own in each.weight_names}


def fp8_state_dict(model: nn.Module) -> dict[str, Any]:
    """Scales and amax histories of the FP8 layers of ``model``.

    Returns:
        ``version`` (1), ``names`` (n strings ``<module>.<role>``), ``scale`` (float32 ``[n]``), ``amax_history``
        (float32 ``[len, n]``, oldest first), ``seen`` (float32 ``[n]``, the amaxes since the last update), ``counts``
        (float32 ``[n]``, the number of updates in which a tensor had a valid amax), ``updates`` and ``steps``. If
        they are known, also ``fp8_format`` and ``margin``, which the scales were computed for, and ``slower``, the
        reasons of layers that stay in high precision because it is faster. The dictionary loads with
        ``torch.load(weights_only=True)``.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    require_module("fp8_state_dict", model)
    named = [pair for name, module in fp8_modules(model) for pair in module.named_slots(name)]
    slots = [slot for _, slot in named]
    histories = list(dict.fromkeys(slot.history for slot in slots))
    span = next((history.span for history in histories if history.span), None)
    steps = [history.steps for history in histories if history.steps is not None]
    windows = [slot.history.amax_history[:, slot.index] for slot in slots]
    length = max(map(len, windows), default=0)
    padded = [torch.cat([window.new_zeros(length - len(window)), window]) for window in windows]

    def stacked(values: Iterable[Tensor]) -> Tensor:
        return torch.stack([*values]) if slots else torch.zeros(0, dtype=torch.float32, device="cpu")

    return {
        "version": STATE_VERSION,
        "names": [name for name, _ in named],
        "scale": stacked(slot.scale_for(span) if span else slot.scale for slot in slots),
        "amax_history": torch.stack(padded, 1) if padded else torch.zeros(0, 0, dtype=torch.float32, device="cpu"),
        "updates": max((history.updates for history in histories), default=0),
        "seen": stacked(slot.amax.detach() for slot in slots),
        "counts": stacked(slot.history.num_observed[slot.index] for slot in slots),
        **saved_steps(max(steps, default=None)),
        **saved_span(span),
        **saved_choice(histories[0] if histories else None, model),
    }


def load_fp8_state_dict(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load the scales and histories of ``state`` into the FP8 layers of ``model``. Slots missing in it start empty.

    A warning says if ``state`` has others, which are ignored.

    Args:
        model: a model with FP8 layers (see ``convert_module``).
        state: the result of :func:`fp8_state_dict`, or the ``"model"`` entry of the plugin's state in a checkpoint.

    Returns:
        The names of the slots that are missing in ``state``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``state`` is malformed, if ``model`` has no FP8 layer, or if no name in ``state`` is a slot of
            ``model``. The model is then unchanged.
    """
    require_module("load_fp8_state_dict", model)
    saved_names, *_ = validated_state(state)
    names: dict[AmaxHistory, list[str]] = {}
    for name, module in fp8_modules(model):
        for slot_name, slot in module.named_slots(name):
            names.setdefault(slot.history, list(slot.history.names))[slot.index] = slot_name
    if not names:
        raise ValueError("the model has no FP8 layer to load the state into; call convert_module(model) first")
    model_names = [name for slot_names in names.values() for name in slot_names]
    if saved_names and not set(saved_names) & set(model_names):
        raise ValueError(
            f"no name in the state is a tensor of this model: the state has, for example, {saved_names[0]!r}, and the "
            f"model {model_names[0]!r}; pass the module that was saved, which may be a child or the parent of this one"
        )
    if unknown := sorted(set(saved_names) - set(model_names)):
        said = f"the model lacks {len(unknown)} tensors of the FP8 state, {unknown[0]} for example, which are ignored"
        warnings.warn(said, stacklevel=2)
    return [name for history, own in names.items() for name in history.load_state_dict(state, own, model)]


class FP8State:
    """The FP8 state of ``model`` as an object with a state, as ``accelerator.register_for_checkpointing`` takes it."""

    def __init__(self, model: nn.Module) -> None:
        require_module("FP8State", model)
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """See :func:`fp8_state_dict`."""
        return fp8_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :func:`load_fp8_state_dict`. A warning names tensors that are missing, which start empty."""
        if missing := load_fp8_state_dict(self.model, state_dict):
            said = f"the FP8 state lacks {len(missing)} tensors, {missing[0]} for example, which start without scales"
            warnings.warn(said, stacklevel=2)


def update_fp8_scales(model: nn.Module) -> None:
    """Compute delayed scales from the amaxes that the FP8 layers of ``model`` observed since their last update.

    A step of a ``torch.optim.Optimizer`` that holds their parameters does so automatically. Call this function after
    each step of any other optimizer: one that does not inherit from torch's, or that holds copies of the parameters.
    It also drops cached FP8 weights. All ranks that share scales must call it.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    require_module("update_fp8_scales", model)
    for _, module in fp8_modules(model):
        if isinstance(module, LinearLayer) and module._weight_cache:
            module.forget_weight()  # the optimizer may have written to its data
    slots_of = _slots_of(model)
    decide_where_faster(slots_of)
    waiting = []
    for history, slots in slots_of.items():
        if others := sorted(set(range(len(history.names))) - slots):  # of the rest of the model
            waiting.append((history, others, history.amax[others]))
            history.amax[others] = 0.0
    update(slots_of)
    for history, others, amaxes in waiting:
        history.amax[others] = amaxes


def reset_fp8_scales(model: nn.Module) -> None:
    """Empty the delayed scales and amax histories of the FP8 layers of ``model``, as those of a new model.

    Until the next update each tensor is scaled by its current amax. Call this function after loading weights without
    FP8 state into a model that has been trained: its scales are those of other weights. ``model`` may be a part of a
    converted model; the other parts keep their scales. All ranks that share scales must call it.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    require_module("reset_fp8_scales", model)
    for history, slots in _slots_of(model).items():
        history.reset(None if len(slots) == len(history.names) else slots)


def _slots_of(model: nn.Module) -> dict[AmaxHistory, set[int]]:
    """The slots of the FP8 layers of ``model``, by their histories in order of creation."""
    slots: dict[AmaxHistory, set[int]] = {}
    for _, module in fp8_modules(model):
        for _, slot in module.named_slots():
            slots.setdefault(slot.history, set()).add(slot.index)
    return dict(sorted(slots.items(), key=lambda item: item[0].creation_index))


def state_for(recipe: Recipe, state: dict[str, Any], saved_with: Any) -> dict[str, Any]:
    """``state`` with its scales recomputed for ``recipe``.

    Args:
        recipe: the recipe that training continues with.
        state: the result of :func:`fp8_state_dict`.
        saved_with: the fields of the recipe that computed the scales, for states that do not hold it. Fields of a
            recipe that is not delayed scaling are ignored.
    """
    if not isinstance(recipe, DelayedScaling):
        return state
    before = span_in(state) or _span_of_fields(saved_with)
    after = span_of(recipe)
    if before is None:
        return state
    factor_of_role = {role.value: span_ratio(before, after, role) for role in Role}
    factors = [factor_of_role.get(name.rpartition(".")[2], 1.0) for name in state["names"]]
    scale = state["scale"] * torch.tensor(factors, dtype=torch.float32, device=state["scale"].device)
    return {**state, "scale": scale.clamp(max=FLOAT32_MAX), **saved_span(after)}


def _span_of_fields(saved_with: Any) -> Span | None:
    try:
        recipe = make_recipe(saved_with)
    except (TypeError, ValueError):
        return None
    return span_of(recipe) if isinstance(recipe, DelayedScaling) else None
