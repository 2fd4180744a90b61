"""Owners: which optimizers update which slots.

The owner of a slot is its layer, or the closest parent of the layer up to the root of the converted model, that has a
parameter which requires a gradient or which an active optimizer holds. An optimizer that holds a parameter of the owner
updates the slot. So each of two networks in one model follows its own optimizer, a frozen layer follows the optimizer
of its adapters or of the head after it, and attention without parameters follows the optimizer of its block. A layer
that is frozen or has no parameters, and whose converted model is not known (a copy, or a layer that was not converted),
follows every optimizer.

An optimizer is known from its first step on; those of a Trainer are known earlier. It is active until others have
stepped :data:`IDLE_ROUNDS` times since its last step. Owners are computed at an optimizer step, if since the last step
there is a new model, optimizer or parameter group, if an optimizer becomes active or idle, or if the parameters of a
model have changed, or which of them require gradients. A forward before the first step can also compute them, but not
under FSDP2, since modules have other parameters during a forward.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8.delayed.history import AmaxHistory, all_histories, living, version_of_modules

Slots = frozenset[int]
"""The indices of slots in one history."""

IDLE_ROUNDS = 100
"""The number of steps of another optimizer after which an optimizer that does not step is idle."""


@dataclass(eq=False)
class _Optimizer:
    """The cached facts about one optimizer.

    Attributes:
        parameters: the ``id`` of each parameter that it holds.
        round: the round of steps in which it stepped last.
        active: whether it has stepped in the last :data:`IDLE_ROUNDS` rounds.
        version: the version of the modules and owners that ``owned`` was computed for.
        owned: the histories in which it owns slots, in order of creation, with these slots.
    """

    parameters: list[int]
    round: int
    active: bool = True
    version: tuple[int, int] | None = None
    owned: list[tuple[weakref.ref[AmaxHistory], Slots]] = field(default_factory=list)


_optimizers: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Owners:
    """The owners of one history's slots.

    Attributes:
        version: the version of the modules that they were computed for.
        parameters: for each slot, the ``id`` of its owner's parameters; ``None`` if every optimizer updates it.
        masks: cached masks of slots, by the indices of the slots.
        optimizers: the active optimizers of each slot, cached with the number of known optimizers.
    """

    version: int
    parameters: list[frozenset[int] | None]
    masks: dict[Slots, Tensor] = field(default_factory=dict)
    optimizers: tuple[int, list[set[int]]] = (-1, [])

    def slots_owned_by(self, optimizer: _Optimizer) -> Slots:
        held = set(optimizer.parameters)
        distinct = {id(parameters): parameters for parameters in self.parameters}
        owned = {key for key, parameters in distinct.items() if parameters is None or not parameters.isdisjoint(held)}
        return frozenset(slot for slot, parameters in enumerate(self.parameters) if id(parameters) in owned)

    def optimizers_by_slot(self) -> list[set[int]]:
        """For each slot, the ``id`` of the :class:`_Optimizer` of each of its active optimizers."""
        if self.optimizers[0] != _num_known:
            by_slot: list[set[int]] = [set() for _ in self.parameters]
            for optimizer in _active():
                for slot in self.slots_owned_by(optimizer):
                    by_slot[slot].add(id(optimizer))
            self.optimizers = _num_known, by_slot
        return self.optimizers[1]


_owners: weakref.WeakKeyDictionary[AmaxHistory, _Owners] = weakref.WeakKeyDictionary()
_num_known = 0
"""The number of optimizers, and of changed lists of their parameters, that have been registered."""
_renewals = 0
"""The number of times that owners were invalidated."""
_parameters_of_models: list[tuple[int, bool]] = []
"""The ``id`` of each parameter of the models at the last step, and whether it made its module an owner."""
_held: frozenset[int] = frozenset()
"""The ``id`` of each parameter that an active optimizer holds."""
_round = 0
"""The number of times that an optimizer stepped which had already stepped since the last time."""
_collected = 0
"""The version of the modules at the last run of the garbage collector."""


def _renew() -> None:
    """Invalidate all owners, because optimizers or parameters have changed."""
    global _renewals, _held
    _owners.clear()
    _renewals += 1
    _held = frozenset(parameter for optimizer in _active() for parameter in optimizer.parameters)


def _active() -> list[_Optimizer]:
    return [optimizer for optimizer in list(_optimizers.values()) if optimizer.active]


def _compare_parameters() -> None:
    """Invalidate all owners if the parameters of the models have changed since the last step."""
    global _parameters_of_models
    roots = [module for history in all_histories() for module in living(history.modules)]
    modules = {id(module): module for root in roots for module in root.modules()}
    parameters = [each for module in modules.values() for each in module._parameters.values() if each is not None]
    found = [(id(each), each.requires_grad or id(each) in _held) for each in parameters]
    if found != _parameters_of_models:
        _parameters_of_models = found
        _renew()


def _owners_of(history: AmaxHistory) -> _Owners:
    found = _owners.get(history)
    if found is None or found.version != version_of_modules():
        found = _owners[history] = _find_owners(history)
    return found


def _find_owners(history: AmaxHistory) -> _Owners:
    modules = living(history.modules)
    slots_of = {id(module): slots for module in modules if (slots := history.slots_of[id(module)])}
    layers_with_slots = frozenset(slots_of)
    owners = _Owners(version_of_modules(), [frozenset()] * len(history.names))

    def give(layers: list[int], parameters: frozenset[int] | None) -> None:
        for layer in layers:
            for slot in slots_of.pop(layer, ()):
                owners.parameters[slot] = parameters

    def visit(module: Any) -> tuple[frozenset[int], bool, list[int]]:
        """The parameters of ``module``, whether it is an owner, and the layers inside that have no owner yet."""
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        unclaimed = {id(each) for each in own if not each.requires_grad and id(each) not in _held}
        parameters = frozenset(map(id, own))
        is_owner = len(unclaimed) < len(parameters)
        layers = [id(module)] if id(module) in slots_of else []
        for child in module.children():
            of_child, child_is_owner, without_owner = visit(child)
            parameters |= of_child
            is_owner |= child_is_owner
            layers += without_owner
        if is_owner:
            give(layers, parameters)
            layers = []
        return parameters, is_owner, layers

    # Roots first: a layer is its own root only if it is not part of a converted model.
    for root in sorted(modules, key=lambda module: id(module) in slots_of):
        if not history.slots_of[id(root)] or id(root) in slots_of:
            parameters, _, without_owner = visit(root)
            give(without_owner, None if id(root) in layers_with_slots or not parameters else frozenset())
    return owners


def parameter_ids(optimizer: Any) -> list[int]:
    """The ``id`` of each parameter of ``optimizer``, an object with ``param_groups``."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def know(optimizer: Any) -> _Optimizer:
    """Register ``optimizer``, an object with ``param_groups``, and the parameters that it currently holds."""
    global _num_known
    parameters = parameter_ids(optimizer)
    known = _optimizers.get(optimizer)
    if known is not None and known.parameters == parameters:
        return known
    _num_known += 1
    known = _optimizers[optimizer] = _Optimizer(parameters, _round)
    _renew()
    return known


def note_step(optimizer: Any) -> None:
    """Note a step of ``optimizer``, an object with ``param_groups``, and which optimizers are active after it."""
    global _round
    known = know(optimizer)
    begins_round = known.round == _round
    _round += begins_round
    known.round = _round
    if known.active and not begins_round:
        return
    changed = [each for each in list(_optimizers.values()) if each.active != (_round - each.round <= IDLE_ROUNDS)]
    for each in changed:
        each.active = not each.active
    if changed:
        _renew()


def owned_by(optimizer: Any) -> list[tuple[AmaxHistory, Slots]]:
    """Register ``optimizer``, and return the histories in which it owns slots, in order of creation, with the slots."""
    known = know(optimizer)
    _compare_parameters()
    if known.version != (version_of_modules(), _renewals):
        _collect_unreachable()
        known.version = version_of_modules(), _renewals
        owned = [(history, _owners_of(history).slots_owned_by(known)) for history in all_histories()]
        known.owned = [(weakref.ref(history), slots) for history, slots in owned if slots]
    return [(history, slots) for reference, slots in known.owned if (history := reference()) is not None]


def _collect_unreachable() -> None:
    """With several ranks, run the garbage collector once for each new model.

    A model in a reference cycle, such as a Trainer's, keeps its history until the garbage collector runs, which happens
    at different times on each rank: ranks would reduce different lists of histories. A new model is created on all
    ranks.
    """
    global _collected
    if _collected != version_of_modules():
        _collected = version_of_modules()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            gc.collect()


def have_the_same_optimizers(history: AmaxHistory, first: int, second: int) -> bool:
    """Whether the same known optimizers update the slots ``first`` and ``second``.

    Called in forwards, it returns the state of the last step. If FSDP2 shards the model, it returns False until the
    first step with a new model or optimizer.
    """
    if not _optimizers:
        return True
    owners = _owners.get(history)
    if owners is None:
        if _is_sharded(history):
            return False
        owners = _owners_of(history)
    by_slot = owners.optimizers_by_slot()
    return by_slot[first] == by_slot[second]


def _is_sharded(history: AmaxHistory) -> bool:
    """Whether FSDP2 shards the model. If so, the parameters of modules in a forward are not those of the optimizer."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # sharding a model imports it
    if fsdp is None:
        return False
    return any(isinstance(each, fsdp.FSDPModule) for module in living(history.modules) for each in module.modules())


def mask_of(history: AmaxHistory, slots: Slots) -> Tensor:
    """Bool ``[n]`` on the device of ``history``, True at ``slots``."""
    masks = _owners_of(history).masks
    if slots not in masks:
        mask = torch.zeros(len(history.names), dtype=torch.bool, device="cpu")
        mask[sorted(slots)] = True
        masks[slots] = mask.to(history.scale.device)
    return masks[slots]


def slots_without_optimizer(history: AmaxHistory) -> list[int]:
    """The slots that no known optimizer updates."""
    return [slot for slot, optimizers in enumerate(_owners_of(history).optimizers_by_slot()) if not optimizers]


def all_slots(histories: Iterable[AmaxHistory]) -> list[tuple[AmaxHistory, Slots]]:
    """The histories with all of their slots."""
    return [(history, frozenset(range(len(history.names)))) for history in histories]
