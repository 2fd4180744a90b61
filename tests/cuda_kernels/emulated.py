"""Kernels launched with CPU tensors: run as PTX on the CPU, or only noted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Literal
from zlib import crc32

import torch

import cuda_kernels
from cuda_kernels.host import compile_cache
from cuda_kernels.host.cache_folder import cached
from cuda_kernels.host.launch import Argument, Grid, Map, executing
from cuda_kernels.kernel import Kernel
from lightning_fp8.proofs.cases import Case
from tests.emulator.gcc import needs_gcc as needs_compilers  # noqa: F401
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap
from tests.ptx_on_cpu.mutants import run_as


def ltoir_of(kernel: Kernel, arch: str) -> bytes:
    """The kernel before linking, the slow step: from disk where it was compiled before."""
    from cuda_kernels.lowering import compiler

    return cached(compile_cache.cache_key(kernel, "ltoir", arch), lambda: compiler.ltoir(kernel, arch))


@cache
def ptx_of(kernel: Kernel) -> str:
    """The kernel's PTX for the first of its architectures, from disk where it was compiled before."""
    from cuda_kernels.lowering import compiler

    arch = kernel.architectures[0]
    ptx = cached(
        compile_cache.cache_key(kernel, "ptx", arch), lambda: compiler.link(ltoir_of(kernel, arch), arch, "ptx")[0]
    )
    return ptx.decode().rstrip("\0")


def compiled(kernel: Kernel, arch: str) -> tuple[str, bytes]:
    """The assembler's report and the machine code; kept on disk between runs."""

    from cuda_kernels.lowering import compiler

    def build() -> bytes:
        code, report = compiler.link(ltoir_of(kernel, arch), arch, "cubin")
        return report.encode() + b"\0" + code

    report, _, code = cached(compile_cache.cache_key(kernel, "report", arch), build).partition(b"\0")
    return report.decode(), code


@cache
def program_of(ptx: str) -> Program:
    return Program(ptx)


class Emulator:
    """Runs each launched kernel on the CPU, as its PTX says.

    Where no schedule is given, threads and blocks run forward in some launches and in reverse in others, as the names
    of test and kernel have it: always the same in one test, another in others. Mutated kernels are run in both.

    Attributes:
        launched: what was launched, in order.
    """

    def __init__(
        self,
        *,
        races: bool = True,
        schedule: Literal["forward", "reverse", "random"] | None = None,
        seed: int = 0,
        rewrite: Callable[[Kernel, str], str] = lambda kernel, ptx: ptx,
        accumulation: Literal["float32", "hopper"] = "float32",
        copies: Literal["eager", "late", "random"] = "eager",
    ) -> None:
        self.accumulation, self.copies = accumulation, copies
        self.races, self.schedule, self.seed, self.rewrite = races, schedule, seed, rewrite
        self.launched: list[Kernel] = []

    def __call__(self, kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        alternating: Literal["forward", "reverse"] = (
            "reverse" if crc32(f"{_this_test()} {kernel.name} {len(self.launched)}".encode()) % 2 else "forward"
        )
        self.launched.append(kernel)
        program_of(self.rewrite(kernel, ptx_of(kernel))).launch(
            grid,
            (kernel.threads, 1, 1),
            [passed(arg) for arg in args],
            dynamic_shared=kernel.shared_bytes,
            races=self.races,
            schedule=self.schedule or alternating,
            seed=self.seed,
            accumulation=self.accumulation,
            copies=self.copies,
        )


def _this_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]


def passed(arg: Argument | float) -> torch.Tensor | TensorMap | int | float:
    """What the emulator takes for what a launch takes."""
    if isinstance(arg, Map):
        return TensorMap(arg.tensor, arg.box[:2], 128 if arg.box.swizzle else 0)
    assert not isinstance(arg, bytes)
    return 0 if isinstance(arg, torch.Tensor) and not arg.numel() else arg


def is_noticed(cases: Sequence[Case], kernel: Kernel, ptx: str, mutant: int = 0) -> bool:
    """Whether one of ``cases``, which launch ``kernel``, fails with a mutant in its place.

    Args:
        ptx: the kernel :func:`~tests.ptx_on_cpu.mutants.with_mutants`.
        mutant: counted from 1; 0 is the kernel as it is.

    Raises:
        EmulatorError: ``ptx`` is none that the emulator runs.
    """
    run_as(program_of(ptx), mutant)
    for case, (schedule, copies) in itertools.product(cases, (("forward", "eager"), ("reverse", "late"))):
        emulator = Emulator(
            schedule=schedule,  # type: ignore[arg-type]
            copies=copies,  # type: ignore[arg-type]
            rewrite=lambda launched, own: ptx if launched.name == kernel.name else own,
        )
        try:
            with executing(emulator):
                case.run("cpu")
        except (EmulatorError, AssertionError):
            return True
    return False


def kernels_of(check: Callable[[str], object]) -> list[Kernel]:
    """The kernels that ``check`` launches. None runs, so that what it then asserts does not hold."""
    launched: list[Kernel] = []
    with executing(lambda kernel, *rest: launched.append(kernel)), suppress(AssertionError):
        check("cpu")
    return launched


def builders() -> set[str]:
    """The names of all kernels: functions of :mod:`cuda_kernels` that give a :class:`Kernel`."""
    names = [module.name for module in walk_packages(cuda_kernels.__path__, "cuda_kernels.")]
    modules = [import_module(name) for name in names if ".host" not in name]  # those start them
    return {name.removesuffix("_kernel") for module in modules for name in vars(module) if name.endswith("_kernel")}
