"""One FP8 cast of a tensor that several layers read: q, k and v, or gate and up.

A thread remembers the last inputs that its layers cast, by weak references. A layer that reads one of them again takes
the copies that are there, for its GEMMs and its backward pass.

Under delayed scaling the copies have the scale of the layer that read first, and its amax enters the slots of the
others. Layers that always read the same tensors have equal slots, and sharing changes no bit. It does where their slots
differ: after a checkpoint was loaded in which they do, until its amaxes have left the window, and where one of the
layers reads other tensors, too. Layers whose slots different optimizers update, and layers of different histories, do
not share: one model's tensors would move the other's scales. Nor do layers on two sides of an activation checkpoint's
boundary, because the recomputation inside has only its own casts to repeat.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_fp8.delayed.history import Slot
from lightning_fp8.delayed.owners import have_the_same_optimizers
from lightning_fp8.ops import Quantized
from lightning_fp8.recipes import DelayedScaling, Recipe
from lightning_fp8.scaled import ScaledTensor

MOST_INPUTS = 2
"""Inputs that a thread remembers: a block whose MLP reads what its attention read casts another in between."""


class InputCast:
    """The FP8 copies of one input, and what they were made under.

    It holds the copies until as many layers have read them as did the last time, or the input dies.

    Attributes:
        slot: the input's, of the layer that cast it first; None once the input is gone.
        observed: whether the cast wrote the input's amax into it.
        reads: the layers that have read it.
        storage: a weak reference to the input's, whose address no other storage gets meanwhile.
        rowwise, columnwise: the operands of ``x [R, K]`` and of xᵀ; None where nobody has asked or nobody will.
    """

    __slots__ = ("columnwise", "conditions", "observed", "reads", "recipe", "rowwise", "slot", "storage")

    def __init__(self, slot: Slot, recipe: Recipe, conditions: tuple[Any, ...], observe: bool) -> None:
        self.slot: Slot | None = slot
        self.recipe = recipe
        self.conditions = conditions
        self.observed = observe
        self.reads = 0
        self.storage: StorageWeakRef | None = None
        self.rowwise: ScaledTensor | None = None
        self.columnwise: ScaledTensor | None = None
        slot.readers = max(slot.readers, slot.readers_of_last)
        slot.readers_of_last = 0

    @property
    def is_new(self) -> bool:
        """Whether it has no copies yet, and the first layer reads it."""
        return self.rowwise is None and self.columnwise is None and self.reads <= 1

    def clear(self, _: object = None) -> None:
        """Let go of all that it holds: the input is dead."""
        self.slot = self.rowwise = self.columnwise = self.storage = None

    def serve(self, slot: Slot, observe: bool) -> bool:
        """Whether the layer of ``slot`` takes these copies; its slot then has got what its own cast would write."""
        first_slot = self.slot
        is_first = first_slot is slot
        if first_slot is None or (is_first and self.reads):  # who reads twice may read what something has filled anew
            return False
        if not is_first and isinstance(self.recipe, DelayedScaling) and not self._feed(first_slot, slot, observe):
            return False
        self.reads += 1
        first_slot.readers_of_last = self.reads
        return True

    def _feed(self, first_slot: Slot, slot: Slot, observe: bool) -> bool:
        history = first_slot.history
        if slot.history is not history or (observe and not self.observed):
            return False
        if not have_the_same_optimizers(history, first_slot.index, slot.index):
            return False
        if observe:
            torch.maximum(slot.amax, first_slot.amax, out=slot.amax)
        return True

    def lacks(self, columnwise: bool) -> tuple[bool, bool]:
        """Which copies, rowwise and columnwise, are still to be made for a layer that multiplies these."""
        return self.rowwise is None, columnwise and self.columnwise is None

    def complete(self, made: Quantized | None) -> Quantized:
        """The copies that were there and those that were ``made`` now."""
        rowwise, columnwise = made or (None, None)
        copies = Quantized(rowwise or self.rowwise, columnwise or self.columnwise)
        another_reads = self.slot is not None and (not self.slot.readers or self.reads < self.slot.readers)
        self.rowwise, self.columnwise = copies if another_reads else (None, None)
        return copies


class _Thread(threading.local):
    """One thread's last inputs, newest first, with their casts, which the death of an input clears."""

    def __init__(self) -> None:
        self.casts: tuple[tuple[weakref.ref[Tensor], InputCast], ...] = ()


_thread = _Thread()


def forget_inputs() -> None:
    """Share no cast made before: a region of FP8 begins or ends on this thread."""
    _thread.casts = ()


def _conditions(x: Tensor, dtype: torch.dtype, slot: Slot) -> tuple[Any, ...] | None:
    """What the values of ``x`` and of its cast depend on beside a recipe; None where a cast of it is nobody else's."""
    if x.is_inference():  # these have no version
        return None
    stream = None
    if x.is_cuda:
        if torch._C._cuda_isCurrentStreamCapturing():
            return None  # the graph of one layer may be replayed without that of another
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    # What encloses the forward: activation checkpointing, which disables gradients or hooks saved tensors.
    enclosing = torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)
    return _version(x), dtype, slot.history.updates, stream, enclosing


def _version(x: Tensor) -> tuple[int, int]:
    """What tells other values of ``x``: other ``data`` leaves its number as it was."""
    return x._version, x.untyped_storage()._cdata


def input_cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, slot: Slot, *, observe: bool) -> InputCast | None:
    """The cast of ``x`` for one layer: another layer's, or a new one; None where none can be shared.

    Args:
        x: the layer's input, as it comes.
        dtype: which it is cast from.
        recipe: how it is cast.
        slot: the layer's slot for it; fed here where the cast is another layer's.
        observe: whether a cast feeds it.
    """
    conditions = _conditions(x, dtype, slot)
    if conditions is None:
        return None
    for input, cast in _thread.casts:
        if input() is x and cast.recipe is recipe and cast.conditions == conditions and cast.serve(slot, observe):
            return cast
    cast = InputCast(slot, recipe, conditions, observe)
    cast.reads = slot.readers_of_last = 1
    _remember(x, cast)
    return cast


def _remember(x: Tensor, cast: InputCast) -> None:
    cast.storage = StorageWeakRef(x.untyped_storage())
    _thread.casts = ((weakref.ref(x, cast.clear), cast), *_thread.casts[: MOST_INPUTS - 1])


def cast_before_reading(x: Tensor, recipe: Recipe, slot: Slot, *, observe: bool) -> InputCast | None:
    """A cast like ``x`` in dtype and place, for what is computed from x; None where none can be shared.

    Args:
        slot: of the layer that reads the result first.
    """
    conditions = _conditions(x, x.dtype, slot)
    return None if conditions is None else InputCast(slot, recipe, conditions, observe)


def offer(x: Tensor, cast: InputCast) -> None:
    """Let layers that read ``x``, which nobody has read yet, take ``cast``."""
    cast.conditions = (_version(x), *cast.conditions[1:])
    _remember(x, cast)
