"""The steps of torch's optimizers: one hook before each step and one after it, for all who listen.

A listener is called with the optimizer, an object with ``param_groups``. It joins :data:`before` or :data:`after` once
there is something to do, and leaves when that is done, so a step without listeners costs the call of two hooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fp8.capture import is_capturing

Listener = Callable[[Any], None]
_Each = TypeVar("_Each")

before: list[Listener] = []
after: list[Listener] = []

number = 0
"""The number of the last optimizer step in this process. Cached copies of weights are stale once it changes."""
_numbers = itertools.count(1)  # unique across threads

are_captured = False
"""Whether a CUDA graph has captured an optimizer step: its replays change weights, and do not count steps."""


def listen(listeners: list[Listener], listener: Listener) -> None:
    """Add ``listener`` to :data:`before` or :data:`after`, unless it is there."""
    if listener not in listeners:
        listeners.append(listener)


def leave(listeners: list[_Each], listener: _Each) -> None:
    """Remove ``listener`` if it is there."""
    with suppress(ValueError):
        listeners.remove(listener)


def parameter_ids(optimizer: Any) -> set[int]:
    """The ``id`` of each parameter of ``optimizer``, an object with ``param_groups``."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def before_step(optimizer: Any, *_: Any) -> None:
    """Tell those who listen to steps that begin."""
    if before:
        _tell(before, optimizer)


def after_step(optimizer: Any, *_: Any) -> None:
    """Count a step, and tell those who listen. Also called for optimizers that are not torch's, by a plugin."""
    global number, are_captured
    if torch.compiler.is_dynamo_compiling():
        _after_step_uncompiled(optimizer)
        return
    number = next(_numbers)
    are_captured |= is_capturing()
    if after:
        _tell(after, optimizer)


# A compiled step has graph breaks at these two, as torch's own optimizers have at their beginning and end.
@torch.compiler.disable
def _tell(listeners: list[Listener], optimizer: Any) -> None:
    for listener in tuple(listeners):
        listener(optimizer)


_after_step_uncompiled = torch.compiler.disable(after_step)

register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
