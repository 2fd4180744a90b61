"""The kernels that ``python -m benchmarks`` and ``tests/gpu`` launch on a GPU, compiled on a machine without one.

python -m benchmarks kernels --arch 90a --out kernels     # here, on all processors
LIGHTNING_FP8_KERNELS=kernels python -m benchmarks        # on the GPU's machine, which then compiles nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from benchmarks.contenders import attention_problems, operations
from benchmarks.contenders.attention_contenders import NoKernel
from benchmarks.contenders.attention_launches import Launches
from benchmarks.measuring.plan import Plan
from benchmarks.suites import attention, casts, hardware, layers, products
from cuda_kernels.attention.backward.dkv import attention_dkv_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.gemm_selection import builds_of
from cuda_kernels.kernel import Kernel
from lightning_fp8.cli.kernels import build, doctors_kernels, kernels_of_layer, noted
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.recipes import RECIPES, make_recipe


def kernels(arch: str) -> list[Kernel]:
    """All of these kernels and the doctor's; those of ``tests/gpu`` if the tests are present."""
    rooms = _casts(), _products(arch), _attention(), _hardware(), _layers(arch), _tests(), doctors_kernels()
    found = {kernel.name: kernel for kernel in chain(*rooms)}
    return [kernel for kernel in found.values() if arch in kernel.architectures]


def write(arch: str, folder: Path) -> int:
    """Compile the kernels into ``folder``, printing failures; returns the exit status, 1 if one failed."""
    failed = build(kernels, (arch,), arch, folder)
    for name, error in failed.items():
        print(f"not built: {name}: {error}")
    return int(bool(failed))


def _casts() -> Iterator[Kernel]:
    with noted() as found:
        for rows, columns in casts.FULL.casts:
            # Variants depend on how rows end, not on the number of rows.
            x = torch.randn(128 + rows % 128, columns).bfloat16()
            for operation in (
                *chain.from_iterable(map(operations.casts, (E4M3.dtype, E5M2.dtype))),
                operations.OBSERVE,
                *operations.fused(E4M3.dtype),
            ):
                operations.Call(operation, x)()
        operations.Call(operations.update_scales({}), torch.randn(8, 10))()
    yield from found.values()


def _products(arch: str) -> Iterator[Kernel]:
    plan = Plan(torch.device("cpu"), dry=False)
    for work in products.FULL:
        problem = replace(products._bound_gemm(work, plan).problem, architecture=arch, multiprocessors=2)
        yield from (function(*arguments) for function, arguments in builds_of(problem))


def _attention() -> Iterator[Kernel]:
    with noted() as found:
        for head_dim in {problem.head_dim for problem in attention.FULL}:
            # Variants depend on the number of channels, not on lengths, heads or masks.
            problem = attention_problems.Problem(1, 128, 2, head_dim)
            with suppress(NoKernel):
                Launches(problem, attention_problems.inputs(problem, torch.device("cpu")))
    yield from found.values()


def _hardware() -> Iterator[Kernel]:
    """Except the forward kernel without turns, which is compiled when it is timed."""
    yield from (attention_dkv_kernel(AttentionSpec(128, "bfloat16"), flush) for flush in hardware.FLUSHES)
    with noted() as found:
        for _ in hardware.run(Plan(torch.device("cpu"), dry=True)):
            pass
    yield from found.values()


def _layers(arch: str) -> Iterator[Kernel]:
    for layer in layers.LAYERS:
        for inputs, outputs in layer.sizes:
            for recipe in RECIPES:
                yield from kernels_of_layer(inputs, outputs, layer.tokens, make_recipe(recipe), arch)


def _tests() -> Iterator[Kernel]:
    try:
        from tests.cuda_kernels import run_case
    except ImportError:
        return
    with noted() as found:
        for case in run_case.CASES.values():
            with suppress(AssertionError):  # kernels are not executed
                case.run("cpu")
    yield from found.values()
