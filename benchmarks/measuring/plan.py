"""What a run is to do."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """What a run is on, and how far it goes.

    Attributes:
        device: of the tensors.
        dry: tiny tensors, few repetitions, every line walked.
        kernels: ours are started; else products are those of libraries alone.
    """

    device: torch.device
    dry: bool = False
    kernels: bool = True

    def seconds(self, of_a_contender: float) -> float:
        return 0.0 if self.dry else of_a_contender

    def say(self, progress: str) -> None:
        print(progress, file=sys.stderr, flush=True)
