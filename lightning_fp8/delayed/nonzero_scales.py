"""The host's knowledge of which scales on a GPU are not 0."""

from __future__ import annotations

import torch
from torch import Tensor


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
