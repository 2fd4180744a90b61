"""Attention's backward kernels: their compiled PTX on the CPU with the race detector on, and their machine code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from cuda_kernels.attention.backward.dkv import attention_dkv_256_kernel, attention_dkv_kernel
from cuda_kernels.attention.backward.dq import attention_dq_kernel
from cuda_kernels.attention.host.backward import BackwardLaunch
from cuda_kernels.attention.host.forward import AttentionProblem
from cuda_kernels.attention.host.tiles import RowSpace, Visible
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.kernel import Kernel
from lightning_fp8.attention.ops import Codes
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.all_cases import kernels_of_cases, tiered, tiered_kernels
from tests.cuda_kernels.cases.attention_backward_cases import (
    CASES,
    CAUSAL,
    OnDevice,
    Problem,
    error,
    given,
    nan_by_definition,
    with_nan,
    with_results,
)
from tests.cuda_kernels.emulated import Emulator, compiled, needs_compilers
from tests.machine_code import sass
from tests.machine_code.compiled import code_of
from tests.machine_code.two_warps import usual_round
from tests.tiers import late_rows, thorough

SMALL = Problem((200,), (200,), 4, 2, band=CAUSAL, out="bfloat16")
"""Of a kernel that the cases have, too."""


def gradients(on: OnDevice) -> tuple[torch.Tensor, ...]:
    statistics = on.delta()
    on.run_dq(statistics)
    on.run_dkv(statistics)
    return on.dq, on.dk, on.dv


@needs_compilers
@late_rows("case", lambda: tiered(CASES))
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


@thorough
@needs_compilers
def test_the_order_of_threads_blocks_and_copies_changes_nothing(emulator: Emulator) -> None:
    """Not a bit."""
    found = []
    for emulator.schedule, emulator.copies in (("forward", "eager"), ("reverse", "late"), ("random", "random")):  # type: ignore[assignment]
        found.append(gradients(OnDevice(given(SMALL), "cpu")))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others))


@thorough
@needs_compilers
def test_sums_of_many_queries_keep_their_digits(emulator: Emulator) -> None:
    """With the tensor cores' short accumulator, sums of one sign shrink from tile to tile, but for what has left."""
    emulator.accumulation, emulator.races = "hopper", False
    errors = []
    for kernel in ({"head_dim": 64}, {"head_dim": 96, "out": "float16", "flush": 128}):
        problem = Problem((640,), (128,), offset=1.0, **kernel)  # type: ignore[arg-type]
        on = OnDevice(given(problem), "cpu")
        on.run_dkv(given(problem).statistics())
        errors.append(error(on.dv, on.packed(given(problem).right[2])))
    assert errors[0] < 1e-2
    assert errors[1] < errors[0] / 2


@needs_compilers
@pytest.mark.parametrize("head_dim", [256, pytest.param(64, marks=thorough)])
def test_memory_for_sums_need_not_be_zeroed(head_dim: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three flushes of 128 queries: the first one stores."""
    emulator.races = False
    problem = Problem((400,), (20,), 1, 1, head_dim=head_dim, flush=128)
    empty = torch.empty

    def poisoned(*size: int, **options: Any) -> torch.Tensor:
        return empty(*size, **options).fill_(torch.nan)

    on = OnDevice(given(problem), "cpu")
    monkeypatch.setattr(torch, "empty", poisoned)
    on.run_dkv(given(problem).statistics())
    for found, right in zip((on.dk, on.dv), given(problem).right[1:]):
        assert error(found, on.packed(right)) < 1e-2


@thorough
@needs_compilers
def test_nan_reaches_the_gradients_that_it_enters(emulator: Emulator) -> None:
    """A query's NaN its own and those of the keys that it sees, and nobody's scale."""
    do, q, k, v = given(SMALL).operands
    data = q.data.clone()
    data[0, 1, 130, 5] = torch.nan
    damaged = with_results(SMALL, (do, Codes(data, q.scale_inv), k, v))
    on = OnDevice(damaged, "cpu")
    for actual, right in zip(gradients(on), damaged.right):
        right = on.packed(right)
        assert right.isnan().any()
        assert torch.equal(actual.isnan(), right.isnan())
        assert error(actual.nan_to_num(), right.nan_to_num()) < 2.0**-8


@pytest.mark.parametrize("which", range(4), ids=["do", "q", "k", "v"])
def test_nan_is_where_float64_has_it(which: int) -> None:
    """By the specification; the cases have the kernels'."""
    damaged = with_nan(Problem((130,), (140,), 2), which)
    for found, truth in zip(damaged.right, nan_by_definition(damaged)):
        assert torch.equal(found.isnan(), truth)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def launched(head_dim: int = 64, softmax_scale: float = 1.0, stride: int = 64) -> BackwardLaunch:
    one = RowSpace(1, 1, False)
    problem = AttentionProblem(AttentionSpec(head_dim, "bfloat16"), (1, 1), one, one, Visible(), softmax_scale)
    return BackwardLaunch(problem, (0, stride, 64), (0, 64, 64), torch.device("cpu"))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive(scale: float, emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="softmax_scale="):
        launched(softmax_scale=scale)


def test_rows_that_lie_anywhere(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match=r"strides=\(0, 68, 64\)"):
        launched(stride=68)


# --- Machine code -----------------------------------------------------------------------------------------------------


SPECS = pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(64, "float32"),  # whose kernels the default run's cases launch, too
        *(pytest.param(AttentionSpec(channels, "bfloat16"), marks=thorough) for channels in (64, 96, 128)),
    ],
    ids=str,
)
STORES = {"LDS", "STS", "LDSM", "STSM", "PRMT"}


def packed_codes(names: Counter[str]) -> int:
    return sum(count for name, count in names.items() if name.startswith("F2FP.SATFINITE.E4M3"))


def names_of_the_usual_round(code: sass.Code) -> Counter[str]:
    """Without what is done when a row's scale changes."""
    (step,) = sass.steps(code)
    return Counter(each.name for each in usual_round(code, step))


@needs_compilers
@SPECS
def test_a_tile_of_keys_in_machine_code(spec: AttentionSpec) -> None:
    code, channels = code_of(attention_dq_kernel(spec)), spec.head_dim
    found, names = sass.counts_in_a_step(code)
    assert [*sass.faults_of_steps(code, {channels // 32, 4}, ahead=4)] == []
    assert not sass.gpu_wide_barriers(code)
    assert found["QGMMA"] == 2 * channels // 32 + 4
    assert found["SHFL"] == 4, "of both rows' largest gradients over four lanes; gradients stay where they are"
    assert names["MUFU.EX2"] == 64
    assert packed_codes(names) == 32
    assert not {"CALL", "BAR", *STORES} & set(found)


@needs_compilers
@SPECS
def test_a_tile_of_queries_in_machine_code(spec: AttentionSpec) -> None:
    code, channels = code_of(attention_dkv_kernel(spec)), spec.head_dim
    found, names = sass.counts_in_a_step(code)
    assert [*sass.faults_of_steps(code, {channels // 32, 2})] == []
    assert not sass.gpu_wide_barriers(code)
    assert found["QGMMA"] == 2 * channels // 32 + 4
    assert found["SHFL"] == 8, "of both rows' largest probabilities and gradients over four lanes"
    assert names["MUFU.EX2"] == 32
    usual = names_of_the_usual_round(code)
    assert packed_codes(usual) == 32
    assert not [name for name in usual if name.startswith("SHFL")], "rows need a common maximum for new scales only"
    assert found["LDS"] == 18, "two statistics of 16 columns, and two scales"
    assert not {"CALL", "BAR", "LDG", "RED", *(STORES - {"LDS"})} & set(found)


@thorough
@needs_compilers
def test_a_tile_of_256_channels_in_machine_code() -> None:
    """Scores of 64, 32 and 32 keys, and four products with 64 channels of K; or one result of 64 queries."""
    wide = AttentionSpec(256, "bfloat16")
    dq, dv, dk = (
        code_of(kernel)
        for kernel in (
            attention_dq_kernel(wide),
            attention_dkv_256_kernel(wide, "dv"),
            attention_dkv_256_kernel(wide, "dk"),
        )
    )
    for code, groups, products, shuffles, powers, loads in (
        (dq, {8, 4}, 3 * 16 + 4 * 4, 4, 64, 0),
        (dv, {8, 2}, 8 + 2, 4, 32, 8 + 2),
        (dk, {8, 2}, 16 + 2, 4, 32, 16 + 2),
    ):
        found, names = sass.counts_in_a_step(code)
        assert [*sass.faults_of_steps(code, groups, ahead=0)] == []
        assert not sass.gpu_wide_barriers(code)
        assert found["QGMMA"] == products
        assert found["SHFL"] == shuffles
        assert names["MUFU.EX2"] == powers
        assert packed_codes(names_of_the_usual_round(code)) == powers // 2
        assert found["LDS"] == loads
        assert not {"CALL", "BAR", "RED", *(STORES - {"LDS"})} & set(found)


@needs_compilers
@late_rows("kernel", lambda: tiered_kernels(kernels_of_cases(CASES)))
def test_registers_change_hands(kernel: Kernel) -> None:
    """What the producer gives away and the others take comes out of the pool that the block starts with."""
    report, _ = compiled(kernel, kernel.architectures[0])
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    moved = {
        each.name.split(".")[1]: int(each.operands.split(", ")[-1], 16)
        for each in code_of(kernel)
        if each.opcode == "USETMAXREG"
    }
    assert moved.get("DEALLOC", 0) + 2 * moved.get("TRY_ALLOC", 0) <= 3 * registers
    assert len(moved) == (0 if "quantize" in kernel.name else 2)
