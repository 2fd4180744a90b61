"""All kinds of kernels, proven anew on a card or only listed: what ``lightning-fp8 doctor --prove`` prints."""

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
    """What is known of one kind.

    Attributes:
        kind: its name.
        problem: why its proof failed; empty if it did not.
        text: its kernels, and how long their proof took.
        keys: of their verdicts.
    """

    kind: str
    problem: str
    text: str
    keys: tuple[str, ...] = ()


def proven(device: torch.device) -> Iterator[Line]:
    """Prove each kind of kernel that CUDA device ``device`` has, whatever is known of it, and keep the verdicts."""
    os.environ[proofs.VARIABLE] = "always"
    card = launch.card(device.index or 0)
    for name, kind in kinds_for(launch.architecture_of(device)).items():
        start = time.monotonic()
        problem, kernels = prove_anew(kind.plan, device, kind.key, card)
        text = f"{problem or 'right'} ({time.monotonic() - start:.1f} s): {', '.join(kernels.values())}"
        yield Line(name, problem, text, () if problem else tuple(kernels))


def listed() -> Iterator[Line]:
    """The kernels of each kind, of all architectures; none is compiled or started, and no GPU is needed."""
    for name, kind in KINDS.items():
        kernels = dict.fromkeys(kernel.name for kernel in kernels_of_kind(kind))
        yield Line(name, "" if kernels else "it starts no kernel", ", ".join(kernels))
