"""Every variant of the matrix products, its compiled PTX run on the CPU with the race detector on, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulated import Emulator, executing, needs_compilers
from tests.gemm_cases import CASES
from tests.kernel_cases import Case

pytestmark = needs_compilers


@pytest.fixture(autouse=True)
def emulator() -> Iterator[Emulator]:
    emulator = Emulator()
    with executing(emulator):
        yield emulator


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert [kernel.function.__name__ for kernel in emulator.launched if "gemm" in kernel.name]
