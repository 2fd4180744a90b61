"""The FP8 states of a plugin, one for each model, and their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fp8.arguments import require_mapping
from lightning_fp8.delayed.history import AmaxHistory, validated_state
from lightning_fp8.modules.state import state_for
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe


def validated_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The models' states in the state of a plugin, by name, without those of no tensors and no decision.

    Raises:
        TypeError: If ``state_dict`` is not a mapping of names.
        ValueError: If a state is malformed. The message names its key.
    """
    require_mapping("load_state_dict", state_dict)
    states = {name: state for name, state in state_dict.items() if name != "recipe"}
    return {name: state for name, state in states.items() if validated_state(state)[0] or "slower" in state}


def without_state(histories: dict[str, AmaxHistory], states: dict[str, Any]) -> list[str]:
    """Empty the histories that have no state in ``states``, and return their names."""
    names = [name for name, history in histories.items() if history.names and name not in states]
    for name in names:
        histories[name].reset()
    return names


def load_state(history: AmaxHistory, state: dict[str, Any], recipe: Recipe, saved_with: Any = None) -> None:
    """Load the scales and amaxes of ``state`` into a history, for ``recipe``; report how many, and which are missing.

    Args:
        saved_with: the fields of the recipe that ``state`` was saved with, if they are known.
    """
    new_slots = history.load_state_dict(state_for(recipe, state, saved_with))
    if not isinstance(recipe, DelayedScaling):
        return
    restored = len(history.names) - len(new_slots)
    if restored and bool(history.scale.any()):  # a recipe without state saves empty scales
        age = f", after {history.updates} updates" if history.updates else ""  # not in Transformer Engine's files
        rank_zero_info(f"FP8 state: the scales of {restored} of {len(history.names)} tensors are restored{age}")
    if dropped := [name for name in state["names"] if name not in history.names]:
        rank_zero_info(f"FP8 state: {len(dropped)} tensors of no FP8 layer are dropped, {dropped[0]} for example")
    if new_slots:
        is_foreign = state["names"] and len(new_slots) == len(history.names)
        (rank_zero_warn if is_foreign else rank_zero_info)(
            f"FP8 state: {len(new_slots)} tensors are not in the checkpoint and start empty: {new_slots}"
        )


def by_name(histories: Sequence[AmaxHistory]) -> dict[str, AmaxHistory]:
    """The histories under ``model``, ``model_1``, ..., in the order in which their models were set up."""
    return {f"model_{index}" if index else "model": history for index, history in enumerate(histories)}


def of_living_models(histories: dict[str, AmaxHistory]) -> dict[str, AmaxHistory]:
    """The histories that models still use, with new names, so that no name refers to another model's history."""
    return by_name([history for history in histories.values() if history.in_use])


def with_equal_names(states: dict[str, Any]) -> list[str]:
    """The names of states whose tensors have the same names as another state's, so that the two could be confused."""
    slot_names = {name: tuple(state["names"]) for name, state in states.items() if state["names"]}
    return [name for name, names in slot_names.items() if list(slot_names.values()).count(names) > 1]
