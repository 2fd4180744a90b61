"""Every amax history of this process that is still in use."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_fp8.delayed.history import AmaxHistory

T = TypeVar("T")

_instances: weakref.WeakValueDictionary[int, AmaxHistory] = weakref.WeakValueDictionary()
"""By creation index."""
_creation_indices = itertools.count()
_newest = -1
"""The creation index of the newest history that :func:`collect_unreachable` has met."""


def register(history: AmaxHistory) -> None:
    """Give ``history`` its creation index, unique in this process, and remember it for as long as somebody holds it."""
    history.creation_index = next(_creation_indices)
    _instances[history.creation_index] = history


def living(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """What is still in use of ``objects``: a copy, since another thread may add to them while they are iterated."""
    return [instance for reference in objects.valuerefs() if (instance := reference()) is not None]


def any_history() -> bool:
    """Whether a history exists; without one nothing runs in FP8."""
    return len(_instances) > 0


def all_histories() -> list[AmaxHistory]:
    """Every history in creation order, which all ranks share."""
    return sorted(living(_instances), key=lambda history: history.creation_index)


def collect_unreachable(group: dist.ProcessGroup | None) -> None:
    """Run the garbage collector once for each new model, where several ranks of ``group`` update together.

    A model in a reference cycle, as a Trainer's is, keeps its history until the collector runs, which each rank does at
    another time; ranks would then reduce unequal lists of histories. A new model is made on all ranks alike.
    """
    global _newest
    newest = max((history.creation_index for history in all_histories()), default=-1)
    if newest > _newest:
        _newest = newest
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            gc.collect()
