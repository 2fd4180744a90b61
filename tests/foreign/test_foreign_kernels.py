"""Kernels made by Triton, which cards have proven, run on the emulator and give what they must."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from tests.emulator.samples import needs_gcc

# Before 3.9, Triton's compiler aborts for clusters. With the variable they run or fail.
if not os.environ.get("LIGHTNING_FP8_FOREIGN") and (
    find_spec("triton") is None or Version(version("triton")) < Version("3.9")
):
    pytest.skip('they need Triton 3.9: pip install "triton>=3.9" on Linux', allow_module_level=True)

from tests.cuda_kernels.cases.attention_backward_cases import CASES as ATTENTION_BACKWARD
from tests.cuda_kernels.cases.attention_kernel_cases import CASES as ATTENTION
from tests.cuda_kernels.cases.attention_mma_cases import CASES as ATTENTION_MMA
from tests.cuda_kernels.cases.fused_cases import CASES as FUSED
from tests.cuda_kernels.cases.gemm_cases import CASES as GEMMS
from tests.cuda_kernels.cases.kernel_cases import CASES as OURS
from tests.cuda_kernels.emulated import kernels_of, ptx_of
from tests.foreign.case import Case
from tests.foreign.cases import CASES
from tests.foreign.compiler import Emulated, Noted
from tests.foreign.opcodes import kinds
from tests.tiers import covering, thorough

pytestmark = needs_gcc

ROOT = Path(__file__).parents[2]
CUTLASS = ROOT / "tests/foreign/cutlass/met.txt"


@pytest.mark.parametrize(
    "case", covering(CASES, lambda case: [type(case)]), ids=lambda case: f"{case.kind}-{case.name}".replace(" ", "-")
)
def test_a_kernel_of_triton_gives_what_it_must(case: Case) -> None:
    launch = Emulated()
    case.run(launch)
    assert launch.launched


def test_there_are_enough_kernels_of_enough_kinds() -> None:
    assert len(CASES) >= 25
    assert len({case.kind for case in CASES}) >= 8
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


KINDS = ("persistent", "warp-specialized", "cluster", "tensor adds", "attention")
SYNCHRONIZED = [case for case in CASES if case.kind in KINDS]


@thorough
@pytest.mark.parametrize("case", SYNCHRONIZED, ids=lambda case: f"{case.kind}-{case.name}".replace(" ", "-"))
def test_neither_order_nor_late_copies_change_it(case: Case) -> None:
    case.run(Emulated(schedule="reverse", copies="late"))


def _met() -> set[str]:
    """The kinds of instructions in Triton's kernels, and in the one of CUTLASS that was run."""
    launch = Noted()
    for case in CASES:
        with suppress(AssertionError):  # nothing ran
            case.run(launch)
    lines = CUTLASS.read_text().splitlines() if CUTLASS.exists() else []
    noted = {line for line in lines if not line.startswith("#")}
    return noted.union(*(kinds(kernel.ptx) for kernel in launch.launched))


@thorough
def test_what_no_other_kernel_has_is_listed_in_the_docs() -> None:
    """Both ways: no instruction of ours is neither met nor listed, and none is listed that is met, or not ours."""
    cases = *OURS, *FUSED, *GEMMS, *ATTENTION, *ATTENTION_BACKWARD, *ATTENTION_MMA
    ours = {kernel for case in cases for kernel in kernels_of(case.run)}
    used = set().union(*(kinds(ptx_of(kernel)) for kernel in ours))
    section = (ROOT / "docs/kernels.md").read_text().split("### Instructions that no other project's kernel covers")[1]
    listed = set(section.split("```")[1].split())
    assert listed == used - _met()
