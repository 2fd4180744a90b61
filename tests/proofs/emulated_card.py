"""An emulated card that starts only what it has proven, with faults planted in kernels.

As a program, ``python -m tests.proofs.emulated_card FAULT FOLDER``, it is the process that proves kernels; it adds a
line to ``FOLDER/log`` as it starts. Verdicts are kept in ``FOLDER/proofs``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cuda_kernels.host import launch, proofs
from cuda_kernels.host.launch import Argument, Grid, Launch
from cuda_kernels.host.proofs import Card
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops import plans, proving
from tests.cuda_kernels.emulated import Emulator, ptx_of

CARD = Card("an emulated card", (9, 0), "1.0")
BROKEN = re.compile(r"quantize_tensor\(.*, e5m2, .*\)")
"""The names of the kernels that faults are planted in: casts of gradients."""


def changed(ptx: str, pattern: str, replacement: str) -> str:
    """The PTX with the first match replaced."""
    found, count = re.subn(pattern, replacement, ptx, count=1)
    assert count, pattern
    return found


FAULTS: dict[str, Callable[[str], str]] = {
    "none": lambda ptx: ptx,
    "wrong numbers": lambda ptx: changed(ptx, r"mul\.f32(\s+%f\d+, %f\d+, %f\d+;)", r"add.f32\1"),
    "a trap": lambda ptx: changed(ptx, r"(bar\.sync\s+0;)", r"\1 trap;"),
    "out of bounds": lambda ptx: changed(ptx, r"(st\.global\.f32 \[%rd\d+)\]", r"\1+1048576]"),
    "a hang": lambda ptx: ptx + "// hangs",
    "a crash": lambda ptx: ptx + "// crashes",
}
"""Changes of a kernel's PTX."""


class FaultyEmulator(Emulator):
    """An emulator of kernels with a fault, which hangs or crashes as a driver does."""

    def __init__(self, fault: str) -> None:
        def rewrite(kernel: Kernel, ptx: str) -> str:
            return FAULTS[fault](ptx) if BROKEN.fullmatch(kernel.name) else ptx

        super().__init__(races=False, rewrite=rewrite)

    def __call__(self, kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        ptx = self.rewrite(kernel, ptx_of(kernel))
        if ptx.endswith("// hangs"):
            if os.environ.get("LIGHTNING_FP8_TRAP"):
                raise RuntimeError("a barrier trapped")
            while True:
                pass
        if ptx.endswith("// crashes"):
            os.abort()
        super().__call__(kernel, grid, args)


@contextmanager
def only_proven(code_of: Callable[[Kernel], tuple[Card, bytes]]) -> Iterator[None]:
    """What executors run is launched as on a GPU, once it is proven; ``code_of`` returns a kernel's card and code."""
    bind, run = Launch.__init__, Launch.run

    def bind_proven(self: Launch, kernel: Kernel, *rest: Any) -> None:
        bind(self, kernel, *rest)
        proofs.require(kernel, *code_of(kernel))
        proofs.note("loading", kernel)

    def run_noted(self: Launch, *addresses: Argument) -> None:
        proofs.note("starting", self.kernel)
        run(self, *addresses)

    with patch.object(Launch, "__init__", bind_proven), patch.object(Launch, "run", run_noted):
        yield


@contextmanager
def emulated_card(fault: str, folder: Path) -> Iterator[FaultyEmulator]:
    """Kernels with CPU tensors run on the emulated card; what proves them is this file as a program."""
    emulator = FaultyEmulator(fault)
    command = sys.executable, "-m", "tests.proofs.emulated_card", fault, str(folder)
    plans.clear_plan_cache()
    proofs._known.clear()
    proving._announced.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(launch.EXECUTORS, cpu=emulator))
        stack.enter_context(only_proven(lambda kernel: (CARD, emulator.rewrite(kernel, ptx_of(kernel)).encode())))
        stack.enter_context(patch.object(launch, "multiprocessors", lambda device: 1))
        stack.enter_context(patch.object(proofs, "cache_folder", lambda: folder))
        stack.enter_context(patch.object(proving, "COMMAND", command))
        yield emulator
    plans.clear_plan_cache()
    proofs._known.clear()
    proving._prover.end()


if __name__ == "__main__":
    from lightning_fp8.proofs.__main__ import serve, speaker

    _, planted, path = sys.argv
    with Path(path, "log").open("a") as file:
        file.write(f"{os.getpid()}\n")
    with emulated_card(planted, Path(path)):
        serve(speaker())
