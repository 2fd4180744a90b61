"""The process that proves kernels: it takes plans line by line and says what it does, line by line.

    python -m lightning_fp8.proofs

:class:`lightning_fp8.ops.proving.Prover` starts it and says what each line holds. It ends where a kernel has crashed,
since its CUDA context is of no use then, and where its input ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cuda_kernels.host import proofs
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.ops.proving import MARK, decoded
from lightning_fp8.proofs.cases import cases_of
from lightning_fp8.proofs.comparing import WrongResult

Say = Callable[..., None]


class Saying:
    """Says which kernels are loaded and started, and starts none that was refused before."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def compiling(self, kernel: Kernel) -> None:
        self._say("compiling", kernel=kernel.name)

    def loading(self, kernel: Kernel, key: str) -> None:
        self._say("loading", kernel=kernel.name, key=key)
        verdict = proofs.verdict_of(key)
        if verdict is not None and not verdict.proven:
            raise proofs.refusal(verdict)

    def starting(self, kernel: Kernel, key: str) -> None:
        self._say("starting", kernel=kernel.name, key=key)


def serve(say: Say) -> None:
    """Prove what standard input asks for."""
    proofs.watch(Saying(say))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # who asked is gone; also where a kernel hangs

    threading.Thread(target=read, daemon=True).start()
    while answer(json.loads(lines.get()), say):
        pass


def answer(request: dict[str, Any], say: Say) -> bool:
    """Prove one plan and say what came out; whether this process may go on."""
    device = request["device"]
    on_cuda = torch.device(device).type == "cuda"
    clear_plan_cache()
    case_name = ""
    try:
        with warnings.catch_warnings():
            # A kernel that cannot be made must not pass for one that is right, since a fallback computed.
            warnings.filterwarnings("error", r"(An )?FP8 kernels? (do|does) not run", RuntimeWarning)
            if on_cuda:
                torch.cuda.set_device(device)
            for case in cases_of(request["plan"], decoded(request["key"])):
                case_name = case.name
                say("case", case=case_name)
                case.run(device)
                if on_cuda:
                    torch.cuda.synchronize()
    except WrongResult as error:
        say(
            "failed",
            problem=f"wrong results in its case {case_name!r}: {error}",
            wrong=True,
            passing=False,
            goes_on=True,
        )
        return True
    except Exception as error:
        text = f"{type(error).__name__} in its case {case_name!r}: {' '.join(str(error).split())}"
        goes_on = isinstance(error, RuntimeWarning | proofs.Refused)
        say("failed", problem=text[:2000], wrong=False, passing=is_passing(error), goes_on=goes_on)
        return goes_on
    say("proven")
    return True


def is_passing(error: Exception) -> bool:
    """Whether the error is no kernel's fault: the card, the memory or the disk is full or busy, or a case has a defect.

    Errors of a kernel are torch's and the driver's, which are ``RuntimeError``.
    """
    words = "out of memory", "busy or unavailable", "CUDA_ERROR_OUT_OF_MEMORY"
    is_a_kernels = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return not is_a_kernels or any(word in str(error) for word in words)


def speaker() -> Say:
    """A function that says a line of JSON on standard output, which nothing else writes to from now on."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(what: str, **more: Any) -> None:
        output.write(f"{MARK}{json.dumps({'what': what, **more})}\n")

    return say


if __name__ == "__main__":
    serve(speaker())
