"""The process that proves kernels: it reads plans from standard input, a line each, and reports its progress in lines.

    python -m lightning_fp8.proofs

:class:`lightning_fp8.ops.proving.Prover` starts it and defines the lines. It exits after a kernel has crashed, because
its CUDA context is then unusable, and at the end of its input.
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


def serve(say: Say) -> None:
    """Prove the plans requested on standard input, and report which kernels are loaded and started."""

    def watch(what: str, kernel: Kernel, key: str) -> None:
        say(what, kernel=kernel.name, key=key)
        verdict = proofs.verdict_of(key) if what == "loading" else None
        if verdict is not None and not verdict.proven:
            raise proofs.refusal(verdict)

    proofs.watch(watch)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the training process has ended; exit even if a kernel hangs

    threading.Thread(target=read, daemon=True).start()
    while answer(json.loads(lines.get()), say):
        pass


def answer(request: dict[str, Any], say: Say) -> bool:
    """Prove one plan and report the result; returns whether this process may continue."""
    device = request["device"]
    on_cuda = torch.device(device).type == "cuda"
    clear_plan_cache()
    case_name = ""
    try:
        with warnings.catch_warnings():
            # A fallback's right result must not prove a kernel that could not be compiled.
            warnings.filterwarnings("error", r"(An )?FP8 kernels? (do|does) not run", RuntimeWarning)
            if on_cuda:
                torch.cuda.set_device(device)
            for case in cases_of(request["plan"], decoded(request["key"])):
                case_name = case.name
                say("case", case=case_name)
                case.run(device)
                if on_cuda:
                    torch.cuda.synchronize()
    except Exception as error:
        wrong = isinstance(error, WrongResult)
        what = "wrong results" if wrong else type(error).__name__
        problem = f"{what} in its case {case_name!r}: {' '.join(str(error).split())}"[:2000]
        goes_on = isinstance(error, WrongResult | RuntimeWarning | proofs.Refused)
        say("failed", problem=problem, wrong=wrong, passing=not wrong and is_passing(error), goes_on=goes_on)
        return goes_on
    say("proven")
    return True


def is_passing(error: Exception) -> bool:
    """Whether the error is temporary or no kernel's fault: memory, disk or GPU full or busy, or a defect of a case.

    A kernel's errors come from torch and the driver as ``RuntimeError``.
    """
    words = "out of memory", "busy or unavailable", "CUDA_ERROR_OUT_OF_MEMORY"
    is_a_kernels = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return not is_a_kernels or any(word in str(error) for word in words)


def speaker() -> Say:
    """A function that prints JSON lines on the original standard output; all other output is redirected to stderr."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(what: str, **more: Any) -> None:
        output.write(f"{MARK}{json.dumps({'what': what, **more})}\n")

    return say


if __name__ == "__main__":
    serve(speaker())
