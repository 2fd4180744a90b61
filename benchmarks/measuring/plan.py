"""Options of a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """Options of a run.

    Attributes:
        device: of the tensors.
        dry: tiny tensors and few repetitions, to run all code.
        kernels: whether our kernels are launched; otherwise only libraries' products are timed.
    """

    device: torch.device
    dry: bool = False
    kernels: bool = True

    def seconds(self, of_a_contender: float) -> float:
        return 0.0 if self.dry else of_a_contender

    def say(self, progress: str) -> None:
        print(progress, file=sys.stderr, flush=True)
