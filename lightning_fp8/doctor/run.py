"""The program of a subprocess: ``python -m lightning_fp8.doctor.run PROBE SECONDS``.

It prints the probe's result, or exits with its error. Shortly before the time limit it dumps its stack, even if the
import of torch hangs.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from typing import Any

from lightning_fp8.doctor.processes import MARK


def torch_facts() -> str:
    """JSON: torch's version, its CUDA version (null without CUDA), the GPUs, and torch's error if there are none."""
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "problem": ""}
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append((gpu.name, (gpu.major, gpu.minor), gpu.total_memory))
    except Exception as error:  # the type varies; a build without CUDA raises AssertionError
        facts["problem"] = str(error).strip().splitlines()[0]
    return json.dumps(facts)


def compilation() -> str:
    """Compile one kernel for Hopper without torch; the caller passes an empty cache."""
    from cuda_kernels.casts.amax import amax_kernel
    from cuda_kernels.device.tile import tensor_loader
    from cuda_kernels.host import compile_cache

    kernel = amax_kernel(tensor_loader("bfloat16", True), True)
    return f"{kernel.name} for sm_90a: {len(compile_cache.cubin(kernel, '90a')):,} bytes of machine code"


def main(name: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(0.9 * float(seconds))
    try:
        if name in ("torch", "compile"):
            said = torch_facts() if name == "torch" else compilation()
        else:
            from lightning_fp8.doctor import probes

            said = probes.run(name)
    except Exception as error:
        raise SystemExit(f"\n{MARK}{type(error).__name__}: {' '.join(str(error).split())}") from None
    print(f"\n{MARK}{said}")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
