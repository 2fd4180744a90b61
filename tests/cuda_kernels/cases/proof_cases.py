"""The cases that prove kernels on a card, one kind after the other: ``lightning_fp8/proofs/kinds.py``."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

from cuda_kernels.host import launch
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.kinds import KINDS, Kind


def run(kind: Kind, case: Case, device: str) -> None:
    """Run one case; on the CPU, as a card of the kind's first architecture."""
    clear_plan_cache()
    with patch.object(launch, "_emulated_architecture", kind.architectures[0]):
        case.run(device)
    clear_plan_cache()


def run_all(kind: Kind, device: str) -> None:
    """Run all cases of a kind."""
    for case in kind.cases():
        run(kind, case, device)


CASES = [
    Case(f"{name}: {case.name}", partial(run, kind, case)) for name, kind in KINDS.items() for case in kind.cases()
]
FIRST = [case for case in CASES if case.name.endswith(": small")]
"""One of each kind, on small tensors."""
ALL = {name: Case(name, partial(run_all, kind)) for name, kind in KINDS.items()}
"""All cases of a kind, by its name."""
