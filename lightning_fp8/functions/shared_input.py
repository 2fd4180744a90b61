"""One FP8 cast of a tensor that several layers read: q, k and v, or gate and up.

Each thread keeps weak references to the last inputs that its layers cast. Another layer that reads one of these inputs
uses the existing FP8 copies for its GEMMs and its backward pass.

With delayed scaling the copies have the scale of the first layer, and the slots of the other layers get its amax. If
layers always read the same tensors, their slots are equal and sharing does not change results. Results do change if
the slots differ: if one of the layers also reads other tensors, or after loading a checkpoint in which the slots
differ, until those amaxes have left the history.

Layers of different histories do not share, since tensors of one model would then change the scales of another. Neither
do layers across the boundary of an activation checkpoint, because the recomputation inside can only repeat its own
casts.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.history import Slot
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.numerics.scaled import ScaledTensor
from lightning_fp8.ops import Quantized
from lightning_fp8.threads import thread

MOST_INPUTS = 2
"""The number of inputs that a thread keeps. In a parallel block, attention casts another input before the MLP reads."""


class InputCast:
    """The FP8 copies of one input, and the conditions under which they are valid.

    It drops the copies once as many layers have read them as the last time, or once the input is deallocated.

    Attributes:
        slot: the slot of the layer that cast the input first; None once the input is deallocated.
        observed: whether the cast updated the amax of the slot.
        reads: the number of layers that have read the input.
        storage: a weak reference to the input's storage; assigning ``data`` replaces it, and keeps the version.
        rowwise, columnwise: the operands of ``x [R, K]`` and of xᵀ; None if they are not cast yet or no longer needed.
    """

    __slots__ = ("columnwise", "conditions", "observed", "reads", "recipe", "rowwise", "slot", "storage")

    def __init__(self, slot: Slot, recipe: Recipe, storage: Any, conditions: tuple[Any, ...], observe: bool) -> None:
        self.slot: Slot | None = slot
        self.recipe = recipe
        self.conditions = conditions
        self.observed = observe
        self.reads = 0
        self.storage: weakref.ref[Any] | None = weakref.ref(storage)
        self.rowwise: ScaledTensor | None = None
        self.columnwise: ScaledTensor | None = None
        slot.readers = max(slot.readers, slot.readers_of_last)
        slot.readers_of_last = 0

    def clear(self, _: object = None) -> None:
        """Drop all references. Called when the input is deallocated."""
        self.slot = self.rowwise = self.columnwise = self.storage = None

    def serve(self, slot: Slot, observe: bool) -> bool:
        """Whether the layer of ``slot`` can use these copies. If so, its slot gets the amax of the input."""
        first_slot = self.slot
        is_first = first_slot is slot
        if first_slot is None or (is_first and self.reads):  # a second read by the same layer may see new values
            return False
        if not is_first and isinstance(self.recipe, DelayedScaling) and not self._feed(first_slot, slot, observe):
            return False
        self.reads += 1
        first_slot.readers_of_last = self.reads
        return True

    def _feed(self, first_slot: Slot, slot: Slot, observe: bool) -> bool:
        if slot.history is not first_slot.history or (observe and not self.observed):
            return False
        if observe:
            torch.maximum(slot.amax, first_slot.amax, out=slot.amax)
        return True

    def complete(self, made: Quantized | None, columnwise: bool) -> Quantized:
        """The existing copies together with those that were just ``made``; with ``columnwise`` that of xᵀ, too."""
        of_x, of_x_t = made or (None, None)
        copies = Quantized(of_x or self.rowwise, of_x_t or self.columnwise)
        another_reads = self.slot is not None and (not self.slot.readers or self.reads < self.slot.readers)
        self.rowwise, self.columnwise = copies if another_reads else (None, None)
        return copies if columnwise else Quantized(copies.rowwise, None)


def input_cast(x: Tensor, dtype: torch.dtype, recipe: Recipe, slot: Slot, *, observe: bool) -> InputCast | None:
    """The cast of ``x`` for one layer: that of another layer, or a new one; None if its cast cannot be shared.

    Args:
        x: the layer's input, unchanged.
        dtype: the dtype that it is cast to FP8 from.
        recipe: the recipe of the cast.
        slot: the layer's slot for its input. It gets the amax here if the cast is that of another layer.
        observe: whether casts update the amax.
    """
    if x.is_inference():  # these have no version
        return None
    backward = torch._C._current_graph_task_id()  # of a recomputation; or -1
    if is_capturing():
        slot.history.is_captured = True
        if not thread.is_capturing and backward < 0:
            return None  # a region around captures: the graph of one layer may be replayed without another's
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else None
    # What encloses the forward: activation checkpointing, which disables gradients or hooks saved tensors.
    enclosing = torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)
    conditions = x._version, dtype, slot.history.updates, stream, enclosing, backward
    storage = x.untyped_storage()
    for input, cast in thread.casts:
        is_same = input() is x and cast.storage is not None and cast.storage() is storage
        if is_same and cast.recipe is recipe and cast.conditions == conditions and cast.serve(slot, observe):
            return cast
    cast = InputCast(slot, recipe, storage, conditions, observe)
    cast.reads = slot.readers_of_last = 1
    thread.casts = ((weakref.ref(x, cast.clear), cast), *thread.casts[: MOST_INPUTS - 1])
    return cast
