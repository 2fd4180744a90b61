"""The cast of attention's operands: its compiled PTX on the CPU, with the race detector, against the specification."""

from __future__ import annotations

import pytest
import torch

from cuda_kernels.attention.casts.heads import HeadsSpec
from cuda_kernels.attention.host.forward import CastLaunch
from cuda_kernels.attention.host.tiles import CastTables, RowSpace
from cuda_kernels.attention.spec import ORDER_A
from lightning_fp8.attention.ops import cast
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.attention_kernel_cases import CASES, check_cast, rows_of
from tests.cuda_kernels.cases.kernel_cases import BF16
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import thorough

pytestmark = [needs_compilers, pytest.mark.usefixtures("emulator")]


@pytest.mark.parametrize("case", tiered(case for case in CASES if "_heads" in case.name), ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


@thorough
@pytest.mark.parametrize("schedule", ["reverse", "random"])
@pytest.mark.parametrize("centered", [False, True])
def test_the_order_of_threads_changes_nothing(centered: bool, schedule: str, emulator: Emulator) -> None:
    emulator.schedule = schedule  # type: ignore[assignment]
    check_cast(BF16, 128, "cpu", centered=centered, special=True)


@thorough
def test_differences_that_are_infinite_are_the_largest_value(emulator: Emulator) -> None:
    """As in the specification: only what was not finite before the mean was subtracted becomes NaN."""
    x = torch.full((1, 1, 128, 128), -3e38)
    x[:, :, 0] = 3e38
    x[0, 0, 3, 0] = torch.nan
    spec, cpu = HeadsSpec(128, "float32", 4), torch.device("cpu")
    launch = CastLaunch(spec, 1, RowSpace(1, 128, False), (0, 128, 128), (True, False), 1, cpu)
    expected = cast(x, centered=True)
    actual = launch.run(x, CastTables.of(rows_of(torch.tensor([128]), 128)))
    assert actual.data is not None
    found = actual.data.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(found, expected.data[0].float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.scale_inv, expected.scale_inv[0])


def test_nothing_to_cast(emulator: Emulator) -> None:
    rows = RowSpace(2, 0, False)
    launch = CastLaunch(HeadsSpec(64, "bfloat16", 4), 3, rows, (0, 0, 64), (True, True), 1, torch.device("cpu"))
    codes = launch.run(torch.empty(2, 3, 0, 64, dtype=BF16), CastTables.of(rows_of(torch.tensor([0, 0]), 0)))
    assert codes.data is not None
    assert codes.data.shape == (3, 0, 64)
    assert not emulator.launched


def test_heads_that_no_kernel_is_for() -> None:
    with pytest.raises(ValueError, match="head_dim=80: attention's kernels are for"):
        HeadsSpec(80, "bfloat16", 4)


def test_the_order_of_transposed_rows_is_that_of_packed_accumulators() -> None:
    """Lane q of a quad holds columns 2q, 2q + 1, 2q + 8, 2q + 9 of 16, and an operand's 4q to 4q + 3 (PTX ISA)."""
    assert tuple(column for q in range(4) for column in (2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9)) == ORDER_A
