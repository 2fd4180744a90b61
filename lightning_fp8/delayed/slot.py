"""Slot: what an amax history keeps of one tensor, as a module sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fp8.delayed.spans import Span, span_ratio
from lightning_fp8.scaling import FLOAT32_MAX

if TYPE_CHECKING:
    from lightning_fp8.delayed.history import AmaxHistory


@dataclass(eq=False)
class Slot:
    """The entry of one tensor in each buffer of an :class:`AmaxHistory`, as a module sees it.

    It is no tuple: torch.compile would specialize a module's code on its index, and compile it again for every
    other module.

    Attributes:
        history: the history that the slot belongs to.
        index: where it is in the history's buffers, whose last dimension counts slots.
        scale: float32 ``[]``; read by value, it changes at the next update.
        amax: float32 ``[]`` that a cast writes its amax into.
        readers: the layers that read one cast of this slot's module together, as far as known; 0 before the second.
        readers_of_last: those that have read the last one.
    """

    history: AmaxHistory
    index: int
    scale: Tensor
    amax: Tensor
    readers: int = 0
    readers_of_last: int = 0

    def __reduce__(self) -> Any:
        return _slot_of, (self.history, self.index)  # copies and pickles share what their history has

    @property
    def name(self) -> str:
        return self.history.names[self.index]

    def scale_for(self, span: Span) -> Tensor:
        """The scale; where it was made for another format or margin than ``span``'s, what it would be for that."""
        if self.history.span is None or self.history.span == span:
            return self.scale
        ratio = span_ratio(self.history.span, span, self.history.roles[self.index])
        return self.scale if ratio == 1 else (self.scale * ratio).clamp(max=FLOAT32_MAX)

    def scale_is_nonzero(self) -> bool:
        """Whether the host knows, without waiting for the GPU, that the scale is not 0."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return False  # what the host learns later must not compile anew
        return self.history.nonzero_scales.is_nonzero(self.index)


def _slot_of(history: AmaxHistory, index: int) -> Slot:
    return history.slot(index)
