"""``LIGHTNING_FP8_TRAP=1``: in every kernel, a barrier that nothing completes is an error and no hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels.device.sm90 import TRAP_VARIABLE
from cuda_kernels.host import compile_cache
from cuda_kernels.host.launch import executing
from tests.cuda_kernels.cases.all_cases import CASES, kernels_of_case
from tests.cuda_kernels.emulated import Emulator, ptx_of
from tests.ptx_on_cpu import EmulatorError
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
WAIT = re.compile(r"mbarrier\.try_wait[^;]*;")
FIRST = "product-tensor-16x16x16-1/1/128-out=float16"
NAMES = (
    FIRST,
    "product-row-600x264x1300-2/1/256-fast=True-bias=bfloat16",
    "attention_forward-128-whole tiles",
    "attention_dq-64-many keys",
    "attention_dkv-64-many queries",
    "attention_dkv-256-many queries",
)
"""A case of each Hopper kernel with barriers."""
HOPPER = {case.name: case for case in CASES if case.name in NAMES}


def check(name: str) -> None:
    """Run by a process of its own, with the variable: the kernel is imported then."""
    case = HOPPER[name]
    kernels = [kernel for kernel in kernels_of_case(case) if "mbarrier" in ptx_of(kernel)]
    assert kernels
    for kernel in kernels:
        assert len(WAIT.findall(ptx_of(kernel))) == ptx_of(kernel).count("trap;") > 1, kernel.name
        print(compile_cache.cache_key(kernel, "cubin", "90a"))
    if name != FIRST:
        return
    emulator = Emulator()
    with executing(emulator):
        case.run("cpu")  # right where all goes well
        emulator.rewrite = lambda kernel, ptx: WAIT.sub("setp.ne.u32 p, 0, 0;", ptx)
        with pytest.raises(EmulatorError, match="trap"):
            case.run("cpu")


@pytest.mark.parametrize("name", [pytest.param(name, marks=thorough) if name != FIRST else name for name in NAMES])
def test_a_barrier_that_nothing_completes_traps(name: str) -> None:
    command = [sys.executable, "-c", f"from {__name__} import check; check({name!r})"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, TRAP_VARIABLE: "1"}, capture_output=True, text=True, timeout=600
    )
    assert not ran.returncode, ran.stderr[-3000:]
    usual = [kernel for kernel in kernels_of_case(HOPPER[name]) if "mbarrier" in ptx_of(kernel)]
    assert all("trap;" not in ptx_of(kernel) for kernel in usual)
    keys = {compile_cache.cache_key(kernel, "cubin", "90a") for kernel in usual}
    assert len(keys) == len(usual) == len(ran.stdout.split())
    assert not keys & {*ran.stdout.split()}  # kernels that trap are cached under other keys
