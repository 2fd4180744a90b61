"""Attention's forward kernel: its compiled PTX on the CPU with the race detector on, its tables, its machine code."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.spec import ROWS, TILE_FIELDS, AttentionSpec
from cuda_kernels.host.launchers.attention import ForwardLaunch, Visible
from cuda_kernels.host.launchers.attention_tiles import PackedRows, cast_table, padded_rows, ragged_rows, tile_table
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops.attention import Band
from tests.attention.attention_cases import visible_keys
from tests.cuda_kernels.attention_kernel_cases import CASES, CAUSAL, check_forward
from tests.cuda_kernels.emulated import Emulator, compiled, executing, kernels_of, needs_compilers
from tests.cuda_kernels.kernel_cases import Case
from tests.machine_code import sass

FORWARD = [case for case in CASES if case.name.startswith("attention_forward")]
KERNELS = {kernel.name: kernel for case in FORWARD for kernel in kernels_of(case.run)}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    emulator = Emulator()
    with executing(emulator):
        yield emulator


@needs_compilers
@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.name)
def test_case(case: Case, emulator: Emulator) -> None:
    case.run("cpu")
    assert emulator.launched


@needs_compilers
@pytest.mark.parametrize(("schedule", "copies"), [("forward", "late"), ("reverse", "late"), ("random", "random")])
def test_the_order_of_threads_and_copies_changes_nothing(schedule: str, copies: str, emulator: Emulator) -> None:
    emulator.schedule, emulator.copies = schedule, copies  # type: ignore[assignment]
    check_forward(128, "cpu", rows=(130, 600), band=CAUSAL)


@needs_compilers
def test_long_sums_keep_their_digits(emulator: Emulator) -> None:
    """With the tensor cores' short accumulator: each product of 128 keys is added in float32."""
    emulator.accumulation, emulator.races = "hopper", False
    check_forward(64, "cpu", rows=(128, 2048), tolerance=2e-3)


# --- Tables -----------------------------------------------------------------------------------------------------------

BANDS = [
    Band(), CAUSAL, Band(right=0, bottom_right=True), Band(left=100, right=20), Band(left=0, right=0),
    Band(left=130, right=0, bottom_right=True), Band(right=200), Band(left=5, right=300, bottom_right=True),
]  # fmt: skip
LENGTHS = [([300], [300]), ([130, 1, 0, 257], [259, 128, 40, 0]), ([128, 256], [256, 128]), ([64, 200], [500, 129])]


def rows_of(lengths: list[int], form: str) -> PackedRows:
    if form == "ragged":
        return ragged_rows(torch.tensor([0, *itertools.accumulate(lengths)]))
    return padded_rows(len(lengths), max(lengths) + 5, torch.tensor(lengths))


@pytest.mark.parametrize("form", ["padded", "ragged"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("tile", [128, 64])
def test_tiles_are_those_that_somebody_sees(
    band: Band, lengths: tuple[list[int], list[int]], form: str, tile: int
) -> None:
    """Against the mask element by element."""
    queries, keys = (rows_of(each, form) for each in lengths)
    table = tile_table(queries, keys, band.left, band.right, band.bottom_right, tile)
    entries = [dict(zip(TILE_FIELDS, entry)) for entry in table.tolist()]
    starts = {}
    for each in entries:
        sequence = each["sequence"]
        start = each["row"] - int(queries.starts[sequence])
        starts[sequence, start] = each
        count = lengths[1][sequence]
        see = visible_keys(lengths[0][sequence], count, band)[start : start + ROWS]
        assert each["others"] == keys.starts[sequence]
        assert each["count"] == count
        assert each["valid"] == len(see)
        assert each["out_row"] == start + (int(queries.first[sequence]) if form == "ragged" else 0)
        assert each["out_rows"] == min(ROWS, max(0, int(queries.held[sequence]) - start))
        seen = [j // tile for j in see.any(0).nonzero().flatten().tolist()]
        visited = range(each["first"], each["last"])
        assert list(visited) == (list(range(min(seen), max(seen) + 1)) if seen else [])
        for index in visited:
            columns = see[:, index * tile : (index + 1) * tile]
            whole = columns.shape[1] == tile and bool(columns.all())
            assert whole == (each["whole_first"] <= index < each["whole_last"])
        row, column = torch.arange(len(see))[:, None], torch.arange(count)
        low = each["diagonal"] + row - (1 << 29 if band.left is None else band.left)
        high = each["diagonal"] + row + (1 << 29 if band.right is None else band.right)
        assert torch.equal(see, (low <= column) & (column <= high))
    tiles = {(b, s) for b, held in enumerate(queries.held.tolist()) for s in range(0, held, ROWS)}
    assert len(entries) == len(starts)
    assert set(starts) == tiles
    work = [each["last"] - each["first"] for each in entries]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_rows_that_are_cast(form: str) -> None:
    lengths = [130, 0, 257]
    rows = rows_of(lengths, form)
    found = sorted(map(tuple, cast_table(rows).tolist()))
    if form == "ragged":
        assert found == [(0, 0, 128, 0), (0, 128, 2, 128), (2, 130, 128, 384), (2, 258, 128, 512), (2, 386, 1, 640)]
        assert rows.total == 768
    else:
        expected = [(b, s, max(0, min(128, lengths[b] - s)), 384 * b + s) for b in range(3) for s in (0, 128, 256)]
        assert found == expected
        assert rows.total == 3 * 384


# --- Refusals ---------------------------------------------------------------------------------------------------------


def launched(softmax_scale: float = 1.0, stride: int = 64, queries: int = 1) -> ForwardLaunch:
    return ForwardLaunch(
        AttentionSpec(64, "bfloat16"), (1, 1), padded_rows(1, queries), padded_rows(1, 1), Visible(), softmax_scale,
        (0, stride, 64), torch.device("cpu"),
    )  # fmt: skip


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


def code_of(kernel: Kernel) -> list[sass.Instruction]:
    return sass.parsed(sass.disassembled(compiled(kernel, "90a")[1]))


SPECS = [AttentionSpec(channels, out) for channels in (64, 96, 128, 256) for out in ("bfloat16", "float32")]
PRODUCTS = {64: [2, 4], 96: [3, 4], 128: [4, 4], 256: [8, 4, 4]}
"""Of a tile, in groups: of 32 channels each for scores, of 32 keys each for 128 channels of the result."""


@needs_compilers
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_tile_of_keys_in_machine_code(spec: AttentionSpec) -> None:
    code = code_of(attention_forward_kernel(spec))
    (step,) = sass.steps(code)
    found = Counter(code[index].opcode for index in step)
    names = Counter(code[index].name for index in step)
    assert [*sass.faults_of_steps(code, {4, PRODUCTS[spec.head_dim][0]}, ahead=6)] == []
    assert not sass.gpu_wide_barriers(code)
    assert not found["CALL"]
    assert found["QGMMA"] == sum(PRODUCTS[spec.head_dim])
    assert found["SHFL"] == 4, "of the two rows' largest scores over four lanes; probabilities stay where they are"
    assert not found["PRMT"]
    assert names["MUFU.EX2"] == 64 + 2
    assert sum(count for name, count in names.items() if name.startswith("F2FP.SATFINITE.E4M3")) == 32
    assert found["BAR"] == 2
    assert not {"LDS", "STS", "LDSM", "STSM"} & set(found), "scores and probabilities never leave their registers"


@needs_compilers
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
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


def heaviest(table: Tensor) -> int:
    return int((table[:, 3] - table[:, 2]).max())


def test_causal_tiles_with_most_keys_come_first() -> None:
    rows = padded_rows(2, 1024)
    table = tile_table(rows, rows, None, 0, False)
    assert heaviest(table[:2]) == 8
    assert heaviest(table[-2:]) == 1
