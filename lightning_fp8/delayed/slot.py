"""Slot: one row of an amax history, as a module sees it."""

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
    """One row of an :class:`AmaxHistory`, as a module sees it.

    It is no tuple: torch.compile would specialize a module's code on its row's number, and compile it again for every
    other module.

    Attributes:
        history: the history that the row belongs to.
        row: the row's index.
        scale: float32 ``[]``; read by value, it changes at the next update.
        amax: float32 ``[]`` that a cast writes its amax into.
        readers: the layers that read one cast of this row's module together, as far as known; 0 before the second.
        readers_of_last: those that have read the last one.
    """

    history: AmaxHistory
    row: int
    scale: Tensor
    amax: Tensor
    readers: int = 0
    readers_of_last: int = 0

    def __reduce__(self) -> Any:
        return _slot_of, (self.history, self.row)  # copies and pickles share what their history has

    @property
    def name(self) -> str:
        return self.history.names[self.row]

    def scale_for(self, span: Span) -> Tensor:
        """The scale; where it was made for another format or margin than ``span``'s, what it would be for that."""
        if self.history.span is None or self.history.span == span:
            return self.scale
        ratio = span_ratio(self.history.span, span, self.history.roles[self.row])
        return self.scale if ratio == 1 else (self.scale * ratio).clamp(max=FLOAT32_MAX)

    def scale_is_nonzero(self) -> bool:
        """Whether the host knows, without waiting for the GPU, that the scale is not 0."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return False  # what the host learns later must not compile anew
        return self.history.nonzero_scales.is_nonzero(self.row)


def _slot_of(history: AmaxHistory, row: int) -> Slot:
    return history.slot(row)
