"""What a run is to do."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """The device, and whether this is a dry run: tiny tensors, few repetitions, every line walked."""

    device: torch.device
    dry: bool = False

    def seconds(self, of_a_contender: float) -> float:
        return 0.0 if self.dry else of_a_contender

    def say(self, progress: str) -> None:
        print(progress, file=sys.stderr, flush=True)
