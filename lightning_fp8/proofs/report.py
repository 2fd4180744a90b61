"""Prove all kinds of kernels again on a GPU, or list them: the output of ``lightning-fp8 doctor --prove``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cuda_kernels.host import launch, proofs
from lightning_fp8.ops.proving import prove_anew
from lightning_fp8.proofs.kinds import KINDS, kernels_of_kind, kinds_for


class Line(NamedTuple):
    """The result for one kind.

    Attributes:
        kind: the name of the kind.
        problem: why its proof failed; empty if it did not.
        text: the kernels of the kind, and how long the proof took.
        keys: the keys of the kernels' verdicts; empty if the proof failed.
    """

    kind: str
    problem: str
    text: str
    keys: tuple[str, ...] = ()


def proven(device: torch.device) -> Iterator[Line]:
    """Prove each kind of kernel for ``device`` (CUDA), ignoring earlier verdicts, and store the verdicts."""
    os.environ[proofs.VARIABLE] = "always"
    card = launch.card(device.index or 0)
    for name, kind in kinds_for(launch.architecture_of(device)).items():
        start = time.monotonic()
        problem, kernels = prove_anew(kind.plan, device, kind.key, card)
        text = f"{problem or 'right'} ({time.monotonic() - start:.1f} s): {', '.join(kernels.values())}"
        yield Line(name, problem, text, () if problem else tuple(kernels))


def listed() -> Iterator[Line]:
    """List the kernels of each kind for all architectures. Nothing is compiled or launched; no GPU is needed."""
    for name, kind in KINDS.items():
        kernels = dict.fromkeys(kernel.name for kernel in kernels_of_kind(kind))
        yield Line(name, "" if kernels else "it starts no kernel", ", ".join(kernels))
