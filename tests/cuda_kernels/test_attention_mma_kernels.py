"""Attention's kernels for GPUs without wgmma: their compiled PTX on the CPU with the race detector on."""

from __future__ import annotations

import pytest

from cuda_kernels.attention.mma.operands import ARCHITECTURES
from tests.cuda_kernels.attention_mma_cases import CASES
from tests.cuda_kernels.emulated import Emulator, kernels_of, needs_compilers
from tests.cuda_kernels.kernel_cases import Case

NAMED = {case.name: case for case in CASES}


@needs_compilers
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert {"mma" in kernel.name or "delta" in kernel.name for kernel in emulator.launched} == {True}


@needs_compilers
@pytest.mark.parametrize("name", ["mma_attention_forward-128-padded"])
def test_the_order_of_threads_and_copies_changes_nothing(name: str, emulator: Emulator) -> None:
    for emulator.schedule, emulator.copies in (("forward", "late"), ("reverse", "late"), ("random", "random")):  # type: ignore[assignment]
        NAMED[name].run("cpu")


def test_what_is_launched_without_wgmma() -> None:
    """The case's architecture decides, not the caller."""
    for case in CASES:
        for kernel in kernels_of(case.run):
            assert set(ARCHITECTURES) <= set(kernel.architectures)
