"""Single cases, by name, as a program: what a first start on a card, the sanitizer and a rehearsal run.

    python -m tests.cuda_kernels.run_case observe-bf16                 # on the card
    python -m tests.cuda_kernels.run_case --emulated observe-bf16      # on the CPU, as the PTX says
    python -m tests.cuda_kernels.run_case --compile [NAME ...]         # only their kernels, into the cache

Exits with 77 where the card is none of those that the case's kernels are for.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from cuda_kernels.host import compile_cache, launch
from cuda_kernels.host.proofs import VARIABLE
from lightning_fp8.proofs.kinds import KINDS
from tests.cuda_kernels import emulated
from tests.cuda_kernels.cases import (
    attention_backward_cases,
    attention_kernel_cases,
    attention_mma_cases,
    attention_op_cases,
    fused_cases,
    gemm_cases,
    kernel_cases,
    proof_cases,
)

ATTENTION = attention_kernel_cases, attention_backward_cases, attention_mma_cases, attention_op_cases
MODULES = kernel_cases, fused_cases, gemm_cases, *ATTENTION
CASES = {case.name: case for module in MODULES for case in module.CASES} | proof_cases.ALL
NOT_FOR_THIS_CARD = 77
"""What automake's tests exit with when they are skipped."""


def fits(name: str, architecture: str) -> bool:
    """Whether the case is for cards of ``architecture``: products name their tile, more than two numbers on Hopper."""
    if name in KINDS:
        return architecture in KINDS[name].architectures
    if name.startswith("attention_"):
        return architecture == "90a"
    if name.startswith("mma_attention_"):
        return architecture in ("89", "120")
    if not name.startswith("product-"):
        return True
    return (name.split("-")[3].count("/") > 1) == (architecture == "90a")


def compiled(name: str, architecture: str) -> int:
    """How many kernels the case launches, all of them in the cache afterwards."""
    kernels = emulated.kernels_of(CASES[name].run)
    for kernel in kernels:
        compile_cache.cubin(kernel, architecture)
    return len(kernels)


def compile_all(names: Sequence[str], architecture: str) -> None:
    context, processors = multiprocessing.get_context("spawn"), os.cpu_count() or 1
    with ProcessPoolExecutor(min(processors, len(names)), mp_context=context) as pool:
        for name, count in zip(names, pool.map(compiled, names, [architecture] * len(names))):
            print(f"{name}: {count} kernels", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_kernels.run_case", description="Run cases of the kernels by name."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {len(CASES)} cases")
    parser.add_argument("--compile", action="store_true", help="compile the cases' kernels, of all cases by default")
    parser.add_argument("--emulated", action="store_true", help="on the CPU")
    args = parser.parse_args()
    os.environ[VARIABLE] = "0"  # each case compares
    if unknown := set(args.names) - CASES.keys():
        parser.error(f"no case is called {', '.join(sorted(unknown))}; see tests/*_cases.py")
    on_card = torch.cuda.is_available() and not args.emulated
    architecture = launch.architecture_of(torch.device("cuda", 0)) if on_card else "90a"
    names = [name for name in args.names or CASES if fits(name, architecture)]
    if not names:
        print(f"for other cards than sm_{architecture}")
        return NOT_FOR_THIS_CARD
    if args.compile:
        compile_all(names, architecture)
        return 0
    for name in names:
        if args.emulated:
            with launch.executing(emulated.Emulator()):
                CASES[name].run("cpu")
        else:
            CASES[name].run("cuda")
            torch.cuda.synchronize()
        print(f"{name}: right", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
