"""Attention's kernels for GPUs without wgmma: their compiled PTX on the CPU with the race detector on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_kernels.attention.mma.operands import ARCHITECTURES
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.all_cases import kernels_of_case, tiered
from tests.cuda_kernels.cases.attention_mma_cases import CASES, WITHOUT_WGMMA
from tests.cuda_kernels.cases.attention_op_cases import PROBLEMS, run_ops
from tests.cuda_kernels.emulated import Emulator, kernels_of, needs_compilers
from tests.tiers import late_rows, thorough

NAMED = {case.name: case for case in CASES}


@needs_compilers
@late_rows("case", lambda: tiered(CASES))
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert {"mma" in kernel.name or "quantize_gradients" in kernel.name for kernel in emulator.launched} == {True}


@thorough
@needs_compilers
@pytest.mark.parametrize(
    "name",
    ["mma_attention_forward-128-padded", "mma_attention_backward-128-empty", "mma_attention_backward-256-ragged"],
)
def test_the_order_of_threads_and_copies_changes_nothing(name: str, emulator: Emulator) -> None:
    for emulator.schedule, emulator.copies in (("forward", "late"), ("reverse", "late"), ("random", "random")):  # type: ignore[assignment]
        NAMED[name].run("cpu")


def test_what_is_launched_without_wgmma() -> None:
    """The case's architecture decides, not the caller."""
    for case in CASES:
        for kernel in kernels_of_case(case):
            assert set(ARCHITECTURES) <= set(kernel.architectures)


@pytest.mark.parametrize(("channels", "parts", "sums"), [(64, 1, 1), (96, 1, 1), (128, 1, 2), (256, 2, 2)])
def test_what_both_passes_launch_on_cards_without_wgmma(channels: int, parts: int, sums: int) -> None:
    """A sum of 128 channels has a launch of its own; of 256, forward, each half."""
    problem = replace(PROBLEMS["thd"], channels=channels)
    with WITHOUT_WGMMA:
        launched = [kernel.function.__name__ for kernel in kernels_of(lambda device: run_ops(problem, device))]
    products = [name for name in launched if name.startswith("mma_")]
    assert products == [*["mma_attention_forward"] * parts, "mma_attention_dq", *["mma_attention_dkv"] * sums]
