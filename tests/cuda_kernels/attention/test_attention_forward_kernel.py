"""Attention's forward kernel: its compiled PTX on the CPU with the race detector on, and its machine code."""

from __future__ import annotations

import re

import pytest
import torch

from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.host.forward import AttentionProblem, ForwardLaunch
from cuda_kernels.attention.host.tiles import RowSpace, Visible
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.kernel import Kernel
from lightning_fp8.proofs.cases import Case
from tests.cuda_kernels.cases.all_cases import kernels_of_case, tiered, tiered_kernels
from tests.cuda_kernels.cases.attention_kernel_cases import CASES, CAUSAL, check_forward
from tests.cuda_kernels.cases.kernel_cases import BF16
from tests.cuda_kernels.emulated import Emulator, compiled, needs_compilers
from tests.machine_code import sass
from tests.machine_code.compiled import code_of
from tests.tiers import covering, thorough

FORWARD = [case for case in CASES if case.name.startswith("attention_forward")]
KERNELS = {kernel.name: kernel for case in FORWARD for kernel in kernels_of_case(case)}


@needs_compilers
@pytest.mark.parametrize("case", tiered(FORWARD), ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


@thorough
@needs_compilers
def test_any_number_of_tiles(emulator: Emulator) -> None:
    """Of 128 channels, where two tiles are a round of the loop: blocks that visit one to four."""
    check_forward(128, "cpu", rows=(512, 512), band=CAUSAL, sizes=(1.0, 1e12, 1e-3, 1.0), dtype=BF16)


@thorough
@needs_compilers
@pytest.mark.parametrize(("schedule", "copies"), [("forward", "late"), ("reverse", "late"), ("random", "random")])
def test_the_order_of_threads_and_copies_changes_nothing(schedule: str, copies: str, emulator: Emulator) -> None:
    emulator.schedule, emulator.copies = schedule, copies  # type: ignore[assignment]
    check_forward(128, "cpu", rows=(130, 600), band=CAUSAL)


@thorough
@needs_compilers
def test_long_sums_keep_their_digits(emulator: Emulator) -> None:
    """With the tensor cores' short accumulator: each product of 128 keys is added in float32."""
    emulator.accumulation, emulator.races = "hopper", False
    check_forward(64, "cpu", rows=(128, 2048), tolerance=2e-3)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def launched(softmax_scale: float = 1.0, stride: int = 64, queries: int = 1) -> ForwardLaunch:
    problem = AttentionProblem(
        AttentionSpec(64, "bfloat16"), (1, 1), RowSpace(1, queries, False), RowSpace(1, 1, False), Visible(),
        softmax_scale,
    )  # fmt: skip
    return ForwardLaunch(problem, (0, stride, 64), torch.device("cpu"))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive(scale: float, emulator: Emulator) -> None:
    with pytest.raises(ValueError, match="softmax_scale="):
        launched(scale)


def test_rows_of_the_result_that_lie_anywhere(emulator: Emulator) -> None:
    with pytest.raises(ValueError, match=r"strides=\(0, 68, 64\)"):
        launched(stride=68)


def test_channels_that_no_kernel_is_for() -> None:
    with pytest.raises(ValueError, match="head_dim=72"):
        AttentionSpec(72, "bfloat16")


# --- Machine code -----------------------------------------------------------------------------------------------------


SPECS = [AttentionSpec(channels, out) for channels in (64, 96, 128, 256) for out in ("bfloat16", "float32")]
PRODUCTS = {64: [2, 4], 96: [3, 4], 128: [4, 4], 256: [8, 4, 4]}
"""Of a tile, in groups: of 32 channels each for scores, of 32 keys each for 128 channels of the result."""
TILES = {64: 1, 96: 1, 128: 2, 256: 1}
"""Of a round of the loop."""


@needs_compilers
@pytest.mark.parametrize("spec", covering(SPECS, lambda spec: [type(spec)]), ids=str)
def test_a_tile_of_keys_in_machine_code(spec: AttentionSpec) -> None:
    code = code_of(attention_forward_kernel(spec))
    found, names = sass.counts_in_a_step(code)
    tiles = TILES[spec.head_dim]
    assert [*sass.faults_of_steps(code, {4, PRODUCTS[spec.head_dim][0]}, ahead=6)] == []
    assert not sass.gpu_wide_barriers(code)
    assert not found["CALL"]
    assert found["QGMMA"] == tiles * sum(PRODUCTS[spec.head_dim])
    assert found["SHFL"] == tiles * 4, (
        "of the two rows' largest scores over four lanes; probabilities stay where they are"
    )
    assert not found["PRMT"]
    assert names["MUFU.EX2"] == tiles * (64 + 2)
    assert sum(count for name, count in names.items() if name.startswith("F2FP.SATFINITE.E4M3")) == tiles * 32
    assert found["BAR"] == tiles * 2
    assert not {"LDS", "STS", "LDSM", "STSM"} & set(found), "scores and probabilities never leave their registers"


@needs_compilers
@pytest.mark.parametrize("kernel", tiered_kernels(KERNELS.values()), ids=lambda kernel: kernel.name)
def test_registers_change_hands(kernel: Kernel) -> None:
    """What the producer gives away and the others take comes out of the pool that the block starts with."""
    report, _ = compiled(kernel, "90a")
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    moved = {
        each.name.split(".")[1]: int(each.operands.split(", ")[-1], 16)
        for each in code_of(kernel)
        if each.opcode == "USETMAXREG"
    }
    assert moved["DEALLOC"] + 2 * moved["TRY_ALLOC"] <= 3 * registers


def test_every_width_is_tried() -> None:
    tried = {int(re.findall(r"d=(\d+)", name)[0]) for name in KERNELS}
    assert tried == set(PRODUCTS)
