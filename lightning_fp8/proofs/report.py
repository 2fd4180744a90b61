"""Prove all kinds of kernels again on a GPU, or list them: the output of ``lightning-fp8 doctor --prove``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from cuda_kernels.host import launch, proofs
from lightning_fp8.ops.proving import prove_anew
from lightning_fp8.proofs.kinds import KINDS, kernels_of_kind, kinds_for

Line = tuple[str, str, bool]
"""The name of a kind, its kernels with the result of their proof, and whether it succeeded."""


def proven(device: torch.device) -> Iterator[Line]:
    """Prove each kind of kernel for ``device`` (CUDA), ignoring earlier verdicts, and store the verdicts."""
    os.environ[proofs.VARIABLE] = "always"
    card = launch.card(device.index or 0)
    for name, kind in kinds_for(launch.architecture_of(device)).items():
        start = time.monotonic()
        problem, kernels = prove_anew(kind.plan, device, kind.key, card)
        text = f"{problem or 'right'} ({time.monotonic() - start:.1f} s): {', '.join(kernels.values())}"
        yield name, text, not problem


def listed() -> Iterator[Line]:
    """List the kernels of each kind for all architectures. Nothing is compiled or launched; no GPU is needed."""
    for name, kind in KINDS.items():
        kernels = dict.fromkeys(kernel.name for kernel in kernels_of_kind(kind))
        yield name, ", ".join(kernels) or "it starts no kernel", bool(kernels)
