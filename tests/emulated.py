"""Kernels launched with CPU tensors: run as PTX on the CPU, or only noted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Literal

import torch

import cuda_kernels
from cuda_kernels import launch
from cuda_kernels.cache import cached
from cuda_kernels.launch import Argument, Executor, Kernel
from cuda_kernels.tensor_maps import Map
from tests.kernel_cases import Case
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap
from tests.ptx_on_cpu_samples import needs_gcc as needs_compilers  # noqa: F401


def ltoir_of(kernel: Kernel, arch: str) -> bytes:
    """The kernel before linking, the slow step: from disk where it was compiled before."""
    return cached(kernel.key("ltoir", arch), lambda: kernel.ltoir(arch))


@cache
def ptx_of(kernel: Kernel) -> str:
    """The kernel's PTX for the first of its architectures, from disk where it was compiled before."""
    arch = kernel.architectures[0]
    ptx = cached(kernel.key("ptx", arch), lambda: launch.link(ltoir_of(kernel, arch), arch, "ptx")[0])
    return ptx.decode().rstrip("\0")


@cache
def program_of(ptx: str) -> Program:
    return Program(ptx)


class Emulator:
    """Runs each launched kernel on the CPU, as its PTX says.

    Attributes:
        launched: what was launched, in order.
    """

    def __init__(
        self,
        *,
        races: bool = True,
        schedule: Literal["forward", "reverse", "random"] = "forward",
        seed: int = 0,
        rewrite: Callable[[Kernel, str], str] = lambda kernel, ptx: ptx,
        accumulation: Literal["float32", "hopper"] = "float32",
        copies: Literal["eager", "late", "random"] = "eager",
    ) -> None:
        self.accumulation, self.copies = accumulation, copies
        self.races, self.schedule, self.seed, self.rewrite = races, schedule, seed, rewrite
        self.launched: list[Kernel] = []

    def __call__(self, kernel: Kernel, blocks: int, args: Sequence[Argument | float]) -> None:
        self.launched.append(kernel)
        program_of(self.rewrite(kernel, ptx_of(kernel))).launch(
            (blocks, 1, 1),
            (kernel.threads, 1, 1),
            [passed(arg) for arg in args],
            cluster=(kernel.cluster, 1, 1),
            dynamic_shared=kernel.shared_bytes,
            races=self.races,
            schedule=self.schedule,
            seed=self.seed,
            accumulation=self.accumulation,
            copies=self.copies,
        )


def passed(arg: Argument | float) -> torch.Tensor | TensorMap | int | float:
    """What the emulator takes for what a launch takes."""
    if isinstance(arg, Map):
        return TensorMap(arg.tensor, arg.box[:2], 128 if arg.box.swizzle else 0)
    assert not isinstance(arg, bytes)
    return 0 if isinstance(arg, torch.Tensor) and not arg.numel() else arg


@contextmanager
def executing(executor: Executor) -> Iterator[None]:
    """Kernels with CPU tensors are started by ``executor``."""
    previous = launch.EXECUTORS.get("cpu")
    launch.EXECUTORS["cpu"] = executor
    try:
        yield
    finally:
        del launch.EXECUTORS["cpu"]
        if previous is not None:
            launch.EXECUTORS["cpu"] = previous


def is_noticed(cases: Sequence[Case], kernel: Kernel, mutant: str) -> bool:
    """Whether one of ``cases``, which launch ``kernel``, fails with the PTX ``mutant`` in its place."""
    for case, (schedule, copies) in itertools.product(cases, (("forward", "eager"), ("reverse", "late"))):
        emulator = Emulator(
            schedule=schedule,  # type: ignore[arg-type]
            copies=copies,  # type: ignore[arg-type]
            rewrite=lambda launched, ptx: mutant if launched.name == kernel.name else ptx,
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
    modules = [import_module(module.name) for module in walk_packages(cuda_kernels.__path__, "cuda_kernels.")]
    return {name.removesuffix("_kernel") for module in modules for name in vars(module) if name.endswith("_kernel")}
