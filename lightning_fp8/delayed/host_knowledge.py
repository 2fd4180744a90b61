"""What the host knows of slots without asking the GPU they lie on: which scales are not 0, and which slots are equal.

Marks are numbers: slots of equal marks hold the same scale, amax and window, to the bit. Slots that begin equal stay so
while the same tensors feed them; a slot that a tensor feeds alone gets a mark of its own. What another rank or compiled
code feeds to one of two such slots alone goes unnoticed: both then serve, but no longer to the bit.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_marks = itertools.count()


class NonzeroScales:
    """An asynchronous host mirror of ``scale > 0``: it never waits for the GPU, and learns an answer a step later.

    A scale that is not 0 stays so until other scales are loaded.
    """

    def __init__(self) -> None:
        self._nonzero: list[bool] = []
        self._pending_copy: tuple[Tensor, torch.cuda.Event] | None = None

    def is_nonzero(self, index: int) -> bool:
        """Whether the scale of the slot ``index`` is known not to be 0."""
        return index < len(self._nonzero) and self._nonzero[index]

    def read(self, scale: Tensor) -> None:
        """Read ``scale > 0`` of float32 ``[n]`` at once; waits for the GPU."""
        if not scale.is_meta:
            self._nonzero = (scale > 0).tolist()
            self._pending_copy = None

    def poll(self, scale: Tensor) -> None:
        """Read ``scale > 0`` after an update of ``scale``, float32 ``[n]``.

        On the CPU the answer is there at once. On a GPU one call starts a copy to the host, and the first call that
        finds it finished takes it.
        """
        if self._nonzero and all(self._nonzero):
            return
        if not scale.is_cuda:
            self._nonzero = (scale > 0).tolist()
        elif torch.cuda.is_current_stream_capturing():
            return
        elif self._pending_copy is None:
            copy = torch.empty(scale.shape, dtype=torch.bool, pin_memory=True)
            copy.copy_(scale > 0, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending_copy = copy, event
        elif self._pending_copy[1].query():
            self._nonzero = self._pending_copy[0].tolist()
            self._pending_copy = None

    def __reduce__(self) -> tuple[type[NonzeroScales], tuple[()]]:
        return NonzeroScales, ()  # copies and pickles start without knowledge


def new_mark() -> int:
    """A mark that no slot of this process has had."""
    return next(_marks)


def compared_marks(slots: Tensor) -> list[int]:
    """New marks for the n slots of float32 ``[m, n]``, compared bit by bit; waits for the GPU that they lie on."""
    bits = slots.t().contiguous().view(torch.int32)
    _, indices = torch.unique(bits, dim=0, return_inverse=True)
    marks = [new_mark() for _ in range(len(bits))]
    return [marks[index] for index in indices.tolist()]
