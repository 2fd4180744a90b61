"""The launches that the tests make of every kernel, and few of them that start each once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from cuda_kernels.kernel import Kernel
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases import (
    attention_backward_cases,
    attention_kernel_cases,
    attention_mma_cases,
    attention_op_cases,
    fused_cases,
    gemm_cases,
    kernel_cases,
)
from tests.cuda_kernels.emulated import kernels_of
from tests.tiers import cover, thorough

ATTENTION = [
    *attention_op_cases.CASES,
    *attention_kernel_cases.CASES,
    *attention_backward_cases.CASES,
    *attention_mma_cases.CASES,
]
CASES: list[Case] = [*kernel_cases.CASES, *fused_cases.CASES, *gemm_cases.CASES, *ATTENTION]


BLOCK = re.compile(r" (\d+x\d+)")
HEAD = re.compile(r"\bd=(\d+)")
SOURCE = re.compile(r"\((gradient of gated|gradient of|gated|norm|experts)?")


@cache
def kernels_of_case(case: Case) -> tuple[Kernel, ...]:
    """What :func:`~tests.cuda_kernels.emulated.kernels_of` finds, for several tests."""
    return tuple(kernels_of(case.run))


def kernels_of_cases(cases: Iterable[Case]) -> list[Kernel]:
    """Those of several, each once by its name."""
    return [*{kernel.name: kernel for case in cases for kernel in kernels_of_case(case)}.values()]


def kinds(kernel: Kernel) -> Iterator[str]:
    """What the default run launches once: each function; of wgmma's products each scaling, of mma's with scales along K
    and without, of blocks each shape, of casts each source of values."""
    name = kernel.function.__name__
    yield name
    if "gemm" in name:
        scaling = kernel.name.split()[2]
        yield f"{name} {scaling if name == 'gemm' else '*' in scaling}"
    if name == "quantize_blocks":
        yield f"{name} {BLOCK.findall(kernel.name)[0]}"
    if name.startswith(("quantize_tensor", "quantize_rows", "quantize_blocks")):
        source = SOURCE.findall(kernel.name)[0]
        if source not in ("gated", "gradient of"):  # the gradient of what is gated computes both
            yield source or ("activation" if "aligned=" in kernel.name else "tensor")


def cost(kernel: Kernel) -> float:
    """About the seconds that compiling it takes: products have much code, as have casts that compute values in rows and
    columns, and heads of many channels."""
    if "gemm" in kernel.function.__name__:
        return 5.0
    by_rows = kernel.function.__name__ in ("quantize_rows", "quantize_blocks", "row_amax")
    channels = HEAD.findall(kernel.name)
    return 10.0 if by_rows and "aligned=" in kernel.name else 1.5 * int(channels[0]) / 64 if channels else 1.5


@cache
def each_once() -> frozenset[Case]:
    """Few cases that together launch every kind of kernel; one of both ops of attention is among them."""
    met = [{kind for kernel in kernels_of_case(case) for kind in kinds(kernel)} for case in CASES]
    costs = [0.2 + sum(map(cost, {*kernels_of_case(case)})) * (case not in attention_op_cases.CASES) for case in CASES]
    return frozenset(CASES[index] for index in cover(met, costs))


@cache
def launched() -> frozenset[str]:
    """The names of the kernels that :func:`each_once` launches."""
    return frozenset(kernel.name for case in each_once() for kernel in kernels_of_case(case))


def tiered(cases: Iterable[Case]) -> list[Any]:
    """Rows for ``parametrize``: the thorough run takes all, the default run those of :func:`each_once`."""
    return [case if case in each_once() else pytest.param(case, marks=thorough) for case in cases]


def tiered_kernels(kernels: Iterable[Kernel]) -> list[Any]:
    """The same of kernels: the default run takes those that its cases launch."""
    return [kernel if kernel.name in launched() else pytest.param(kernel, marks=thorough) for kernel in kernels]
