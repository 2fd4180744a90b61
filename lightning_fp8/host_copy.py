"""What the host knows of scales that live on a card."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Which scales are known on the host not to be 0: asked for now and then, learnt a step later, never waited for.

    A scale that is not 0 stays so, until others are loaded.
    """

    def __init__(self) -> None:
        self._known: list[bool] = []
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def knows(self, row: int) -> bool:
        return row < len(self._known) and self._known[row]

    def follow(self, scale: Tensor) -> None:
        """Look at ``scale [n]`` after an update: at once on the CPU; a card is asked, or its answer taken."""
        if self._known and all(self._known):
            return
        if not scale.is_cuda:
            self._known = (scale > 0).tolist()
        elif torch.cuda.is_current_stream_capturing():
            return
        elif self._arriving is None:
            copy = torch.empty(scale.shape, dtype=torch.bool, pin_memory=True)
            copy.copy_(scale > 0, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving = copy, event
        elif self._arriving[1].query():
            self._known, self._arriving = self._arriving[0].tolist(), None

    def __reduce__(self) -> tuple[type[HostCopy], tuple[()]]:
        return HostCopy, ()  # copies and pickles ask again
