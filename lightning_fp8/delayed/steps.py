"""Optimizer steps, counted where they happen: in ``torch.optim``, whoever calls ``step`` and however."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.instances import all_histories

_numbers = itertools.count(1)  # each is given once, whichever threads step at a time
_generation = 0
_owned: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], dict[int, bool]]] = weakref.WeakKeyDictionary()
"""For each optimizer the ``id`` of its parameters, and by creation index which histories are its."""


def generation() -> int:
    """The number of an optimizer step in this process; a copy computed from a weight is stale once it is another."""
    return _generation


def _stepped(optimizer: Optimizer) -> list[AmaxHistory]:
    histories = all_histories()
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    known, owned = _owned.get(optimizer, ([], {}))
    if parameters != known or any(history.creation_index not in owned for history in histories):
        ids = set(parameters)
        owned = {history.creation_index: history.is_stepped_by(ids) for history in histories}
        _owned[optimizer] = parameters, owned
    return [history for history in histories if owned[history.creation_index]]


def _overflowed(optimizer: Optimizer) -> bool:
    """Whether ``GradScaler`` has a fused optimizer step over infinite gradients, which changes nothing.

    A tensor on the GPU is not read: the host would wait for it.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


# A compiled step breaks its graph here, as torch's own optimizers do at their beginning and end.
@torch.compiler.disable
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(history.steps < 0 for history in all_histories()):
        for history in _stepped(optimizer):
            history.steps = max(history.steps, 0)  # an optimizer is known: what its closure runs belongs to its step


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _generation
    _generation = next(_numbers)
    if _overflowed(optimizer):
        return
    stepped = _stepped(optimizer)
    for history in stepped:
        history.steps = history.steps + 1
        history.stepped = True
    for update in dict.fromkeys(history.after_step for history in stepped if history.after_step is not None):
        update()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
