"""Owners: which optimizers update which slots.

The owner of a slot is the nearest module around it, the layer itself first and the root of the converted model last,
that has a parameter which requires a gradient or which a known optimizer holds. An optimizer that holds a parameter of
the owner updates the slot. So of two networks in one model each follows its own optimizer; a frozen layer follows that
of its adapters, or of the head behind it; attention without parameters follows that of its block. A layer that was
converted with no model around it and has no parameters at all follows every optimizer.

An optimizer is known from its first step on; a Trainer's are known before. Owners are found at a step, when another
model, optimizer or list of an optimizer's parameters has come since the last one, or an FP8 layer has other parameters
or others that require gradients; a forward that asks before the first step finds them, too, but not under FSDP2, which
has other parameters in the modules then.
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
"""Indices of slots of one history."""


@dataclass(eq=False)
class _Optimizer:
    """What is known of one optimizer.

    Attributes:
        parameters: the ``id`` of each parameter that it holds.
        version: of the modules and owners that ``owned`` was computed for.
        owned: the histories of which it owns slots, in creation order, and these.
    """

    parameters: list[int]
    version: tuple[int, int] | None = None
    owned: list[tuple[weakref.ref[AmaxHistory], Slots]] = field(default_factory=list)


_optimizers: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Owners:
    """The owners of one history's slots.

    Attributes:
        version: of the modules that they were found in.
        parameters: for each slot the ``id`` of its owner's parameters; ``None`` where every optimizer updates it.
        masks: tensors that are True at some slots, by their indices.
        optimizers: the known optimizers of each slot, behind how many were known by then.
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
        """For each slot the ``id`` of what is known of its optimizers."""
        if self.optimizers[0] != _num_known:
            by_slot: list[set[int]] = [set() for _ in self.parameters]
            for optimizer in list(_optimizers.values()):
                for slot in self.slots_owned_by(optimizer):
                    by_slot[slot].add(id(optimizer))
            self.optimizers = _num_known, by_slot
        return self.optimizers[1]


_owners: weakref.WeakKeyDictionary[AmaxHistory, _Owners] = weakref.WeakKeyDictionary()
_num_known = 0
"""How many optimizers, or lists of their parameters, have become known so far."""
_renewals = 0
"""How often optimizers or parameters have changed: owners are then found anew."""
_parameters_of_layers: list[tuple[int, bool]] = []
"""The ``id`` of each parameter of an FP8 layer at the last step, and whether it makes its module an owner."""
_held: frozenset[int] = frozenset()
"""The ``id`` of each parameter that a known optimizer holds."""
_collected = 0
"""The version of the modules for which the garbage collector has run."""


def _renew() -> None:
    """Let owners be found anew."""
    global _renewals
    _owners.clear()
    _renewals += 1


def _compare_parameters() -> None:
    """Let owners be found anew if FP8 layers have other parameters than at the last step."""
    global _parameters_of_layers
    modules = [module for history in all_histories() for module in living(history.modules)]
    parameters = [each for module in modules for each in module._parameters.values() if each is not None]
    found = [(id(each), each.requires_grad or id(each) in _held) for each in parameters]
    if found != _parameters_of_layers:
        _parameters_of_layers = found
        _renew()


def _owners_of(history: AmaxHistory) -> _Owners:
    found = _owners.get(history)
    if found is None or found.version != version_of_modules():
        found = _owners[history] = _find_owners(history)
    return found


def _find_owners(history: AmaxHistory) -> _Owners:
    modules = living(history.modules)
    slots_of = {id(module): slots for module in modules if (slots := history.slots_of[id(module)])}
    owners = _Owners(version_of_modules(), [frozenset()] * len(history.names))

    def give(layers: list[int], parameters: frozenset[int] | None) -> None:
        for layer in layers:
            for slot in slots_of.pop(layer, ()):
                owners.parameters[slot] = parameters

    def visit(module: Any) -> tuple[frozenset[int], bool, list[int]]:
        """The parameters of ``module``, whether it owns slots inside, and the layers inside that found no owner yet."""
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

    # Roots first: a layer is its own root only where no converted model holds it.
    for root in sorted(modules, key=lambda module: id(module) in slots_of):
        if not history.slots_of[id(root)] or id(root) in slots_of:
            parameters, _, without_owner = visit(root)
            give(without_owner, frozenset() if parameters else None)
    return owners


def parameter_ids(optimizer: Any) -> list[int]:
    """The ``id`` of each parameter that ``optimizer``, anything with ``param_groups``, holds."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def know(optimizer: Any) -> _Optimizer:
    """Know ``optimizer``, anything with ``param_groups``, and which parameters it holds now."""
    global _num_known, _held
    parameters = parameter_ids(optimizer)
    known = _optimizers.get(optimizer)
    if known is not None and known.parameters == parameters:
        return known
    _renew()
    _num_known += 1
    known = _optimizers[optimizer] = _Optimizer(parameters)
    _held = frozenset(parameter for each in list(_optimizers.values()) for parameter in each.parameters)
    return known


def owned_by(optimizer: Any) -> list[tuple[AmaxHistory, Slots]]:
    """The histories of which ``optimizer`` owns slots, in creation order, and these; it is known from now on."""
    known = know(optimizer)
    _compare_parameters()
    if known.version != (version_of_modules(), _renewals):
        _collect_unreachable()
        known.version = version_of_modules(), _renewals
        owned = [(history, _owners_of(history).slots_owned_by(known)) for history in all_histories()]
        known.owned = [(weakref.ref(history), slots) for history, slots in owned if slots]
    return [(history, slots) for reference, slots in known.owned if (history := reference()) is not None]


def _collect_unreachable() -> None:
    """Run the garbage collector once for each new model, where there are several ranks.

    A model in a reference cycle, as a Trainer's is, keeps its history until the collector runs, which each rank does at
    another time; ranks would then reduce unequal lists of histories. A new model is made on all ranks alike.
    """
    global _collected
    if _collected != version_of_modules():
        _collected = version_of_modules()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            gc.collect()


def have_the_same_optimizers(history: AmaxHistory, first: int, second: int) -> bool:
    """Whether the known optimizers that update the slot ``first`` are those that update ``second``.

    Asked in forwards: as of the last step; where FSDP2 shards the model and nobody has stepped since a model or an
    optimizer has come, False.
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
    """Whether FSDP2 shards parameters around the slots: in forwards modules then have others than the optimizer."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which sharding a model imports
    if fsdp is None:
        return False
    return any(isinstance(each, fsdp.FSDPModule) for module in living(history.modules) for each in module.modules())


def mask_of(history: AmaxHistory, slots: Slots) -> Tensor:
    """Bool ``[n]`` where ``history`` is, True at ``slots``."""
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
