"""Common code of modules that cast their output for the FP8 layers that read it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8 import fp8_region
from lightning_fp8.functions.linear import Slots
from lightning_fp8.functions.shared_input import InputCast, cast_before_reading
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.swap import swap_class, unsharded_class
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import Role


class Begun(NamedTuple):
    """A prepared cast of a module's output.

    Attributes:
        cast: receives the FP8 copies, for all readers of the output.
        slots: the slots of the first layer that reads it.
        observe: whether the cast updates the slots' amaxes.
    """

    cast: InputCast
    slots: Slots
    observe: bool


class CastingModule(nn.Module):
    """A module whose output FP8 layers read. In high precision and under torch.compile it runs its original forward."""

    cast: bool | None = None
    """Whether a training forward in an FP8 context has cast since observation started; None before the first one,
    and in compiled code."""
    called_otherwise: bool = False
    """Whether a forward in evaluation mode, or outside an FP8 context, ran since observation started."""

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes that identify it in compiled code; see :func:`.record.note_traced`."""
        raise NotImplementedError

    def _note(self, casts: bool, context: fp8_region.FP8Context) -> None:
        if not (self.training and context.enabled):
            if not self.called_otherwise:  # setting a module's attribute is slow, so only if it changes
                self.called_otherwise = True
        elif not self.cast and self.cast is not casts:
            self.cast = casts


def begin_cast(like: Tensor, reader: LinearLayer) -> Begun | None:
    """Prepare the cast of a tensor like ``like`` for ``reader``, which reads it first; None if it cannot be shared."""
    context = reader.running_context()
    recipe = context.recipe
    (slots, *_) = reader.ensure_slots(like.device)
    slot = slots[Role.INPUT]
    observe = torch.is_grad_enabled() and reader.training and context.observe
    if observe and isinstance(recipe, DelayedScaling):
        slot.history.follow(recipe)
    cast = cast_before_reading(like, recipe, slot, observe=observe)
    return None if cast is None else Begun(cast, slots, observe)


def in_transform() -> bool:
    """Whether torch.func transforms or forward-mode derivatives are active, which FP8 layers do not support."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_known(module: nn.Module, known: Mapping[str, str], casting: type) -> bool:
    """Whether ``known`` contains the class of ``module`` (without importing transformers), or it casts already."""
    cls = unsharded_class(module)
    return isinstance(module, casting) or known.get(cls.__name__) == cls.__module__


def make_casting(module: nn.Module, casting: type) -> None:
    """Add ``casting`` as a base before the class of ``module``, in place."""
    if not isinstance(module, casting):
        swap_class(module, casting_class(casting, unsharded_class(module)))
        module.cast = None  # type: ignore[assignment]  # tells the module itself, if its class changes again


def casting_class(casting: type, cls: type) -> type:
    """``cls`` with the base ``casting``; its ``__module__`` is that of ``casting``, where unpickling looks it up.

    There is one while modules are of it. Python's list of subclasses is weak, so no cache keeps ``cls`` alive.
    """
    subclasses: list[type] = cls.__subclasses__()
    for made in subclasses:
        if made.__bases__ == (casting, cls):
            return made
    return type(cls.__name__, (casting, cls), {"__module__": casting.__module__})


def class_named(name: str, known: Mapping[str, str], casting: type) -> type:
    """The class of a pickled module.

    Raises:
        AttributeError: If ``known`` has no ``name``.
    """
    if name not in known:
        raise AttributeError(f"module {casting.__module__!r} has no attribute {name!r}")
    return casting_class(casting, getattr(import_module(known[name]), name))
