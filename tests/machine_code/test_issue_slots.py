"""Casts issue their instructions in well less time than memory takes; and the counter, on listings written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from cuda_kernels.casts.activation import activation_loader
from cuda_kernels.casts.amax import amax_kernel, row_amax_kernel
from cuda_kernels.casts.quantize import quantize_columns_kernel, quantize_rows_kernel, quantize_tensor_kernel
from cuda_kernels.casts.quantize_blocks import quantize_blocks_kernel
from cuda_kernels.casts.transpose import transpose_kernel
from cuda_kernels.device.tile import TILE, tensor_loader
from cuda_kernels.kernel import Kernel
from cuda_kernels.norm.backward import backward_row_layout, norm_backward_kernel
from cuda_kernels.norm.cast import normalize_kernel
from cuda_kernels.norm.rows import cast_row_layout
from cuda_kernels.norm.statistics import NormSpec
from tests.cuda_kernels.cases.all_cases import launched
from tests.machine_code.issue_slots import NoWalk, issue_clocks, issue_slots, memory_clocks, slots_of_another
from tests.machine_code.sass import disassembled
from tests.machine_code.test_compiled_kernels import compiled
from tests.tiers import covering

# --- The counter ------------------------------------------------------------------------------------------------------


def listing(*lines: str) -> str:
    """As ``nvdisasm -c`` writes it: addresses before instructions, none before labels, codes behind."""
    return "\n".join(
        line if line.startswith(".L") else f"        /*{16 * index:04x}*/  {line} ;   /* 0x0 */"
        for index, line in enumerate(lines)
    )


def test_a_straight_line_is_counted_to_its_end() -> None:
    text = listing("S2R R0, SR_TID.X", "@!P0 IMAD.MOV R1, RZ, RZ, R0", "EXIT", "NOP", "NOP")
    assert issue_slots(text, {}) == 3


LOOP = listing(
    "MOV R0, RZ",
    ".L_x_0:",
    "LDG.E.128 R4, desc[UR4][R2.64]",
    "IADD3 R0, R0, 0x1, RZ",
    "ISETP.LT.AND P0, PT, R0, R1, PT",
    "@P0 BRA `(.L_x_0)",
    "STG.E desc[UR4][R2.64], R4",
    "EXIT",
)


def test_a_loop_is_counted_as_often_as_its_work_asks() -> None:
    assert issue_slots(LOOP, {}) == 1 + 4 + 2
    assert issue_slots(LOOP, {"LDG*": 1}) == 1 + 4 + 2
    assert issue_slots(LOOP, {"LDG.E.128": 3}) == 1 + 3 * 4 + 2
    assert slots_of_another(LOOP, {"LDG.E.128": 3}) == 3 * 4
    with pytest.raises(NoWalk, match="no way"):
        issue_slots(LOOP, {"STG.E": 2})


TWO_WAYS = listing(
    "@P1 BRA P0, `(.L_x_1)",  # to the whole tile
    "CS2R R4, SRZ",
    "ISETP.GT.AND P2, PT, R0, RZ, !P0",
    "@P2 LDG.E.64 R4, desc[UR4][R2.64]",
    "BRA `(.L_x_2)",
    ".L_x_1:",
    "LDG.E.64 R4, desc[UR4][R2.64]",
    ".L_x_2:",
    "@P3 BRA `(.L_x_3)",
    "LDG.E R9, desc[UR4][R6.64]",
    "FMUL R5, R4, R9",
    ".L_x_3:",
    "@P4 EXIT",
    "REDG.E.MAX.STRONG.GPU desc[UR4][R2.64], R5",
    "EXIT",
)


def test_of_two_ways_to_do_the_work_the_cheaper_is_counted() -> None:
    assert issue_slots(TWO_WAYS, {}) == 4  # branch, load, branch, exit
    assert issue_slots(TWO_WAYS, {"LDG.E.64": 1}) == 4
    assert issue_slots(TWO_WAYS, {"LDG.E.64": 1, "FMUL": 1}) == 6
    assert issue_slots(TWO_WAYS, {"LDG*": 2, "REDG*": 1}) == 8


def test_branches_that_a_predicate_operand_decides_may_be_passed() -> None:
    text = listing("BRA.DIV UR4, `(.L_x_0)", "FMUL R0, R0, R1", "EXIT", ".L_x_0:", "FADD R0, R0, R1", "EXIT")
    assert issue_slots(text, {"FMUL": 1}) == 3
    assert issue_slots(text, {"FADD": 1}) == 3


def test_no_walk_leads_through_a_subroutine_or_past_the_end() -> None:
    text = listing("@!P0 BRA `(.L_x_0)", "CALL.REL.NOINC `($__internal_0)", ".L_x_0:", "FMUL R0, R0, R1", "EXIT")
    assert issue_slots(text, {"FMUL": 1}) == 3
    with pytest.raises(NoWalk):
        issue_slots(listing("CALL.REL.NOINC `($__internal_0)", "EXIT"), {})
    with pytest.raises(NoWalk):
        issue_slots(listing("FMUL R0, R0, R1"), {})
    with pytest.raises(ValueError, match="is not known"):
        issue_slots(listing("BRX R2 -0x10", "EXIT"), {})


def test_clocks() -> None:
    """Four schedulers issue 8 warps' 100 instructions in 200 clocks; 4.3 TB/s is 18.56 bytes a clock and processor."""
    assert issue_clocks(100, 256) == 200
    assert memory_clocks(49152) == pytest.approx(2648, abs=1)


# --- Kernels ----------------------------------------------------------------------------------------------------------

LIMIT = 0.6
"""Of the clocks that memory takes, what may go by with issuing: the rest is for what stalls at the same time."""
MARGIN = 0.05
"""By how much another compiler may exceed what is written down here for each kernel."""


@dataclass(frozen=True)
class Work:
    """What one block does at a time.

    Attributes:
        kernel: that does it.
        share: of the clocks that memory takes, what issuing took when this was written.
        bytes: that it reads and writes, without scales and statistics.
        each: what each warp issues for it, as :func:`issue_slots` takes it.
        again: whether a block goes on with other work: then only what that adds is counted.
    """

    kernel: Kernel
    share: float
    bytes: int
    each: Mapping[str, int]
    again: bool = False


QUADS, OCTETS = tensor_loader("bfloat16", 4), tensor_loader("bfloat16", 8)
RMS = NormSpec("bfloat16", "bfloat16", has_mean=False, has_bias=False)
READ, WRITTEN = 2 * TILE * TILE, TILE * TILE

# Of a warp's 16 rows, in four or in eight columns a lane: loads, casts of two elements, stores row by row, transposed.
LOADS_4, LOADS_8 = {"LDG.E.NA.64*": 16}, {"LDG.E.NA.128*": 8}
CASTS, TWO_CASTS = {"F2FP.SATFINITE*": 32}, {"F2FP.SATFINITE*": 64}
ROWS_4, ROWS_8, COLUMNS = {"STG.E": 16}, {"STG.E.64": 8}, {"STG.E.128": 4}
ROW = {**LOADS_8, **CASTS, **ROWS_8}
BOTH, TWICE = {**LOADS_4, **CASTS, **ROWS_4, **COLUMNS}, {**LOADS_4, **TWO_CASTS, **ROWS_4, **COLUMNS}
# All 64 elements of a lane, two at a time.
AMAX = {"HMNMX2*": 32}

WORK = {
    "tensor, row, amax": Work(
        quantize_tensor_kernel(OCTETS, "e4m3", True, False, True), 0.28, READ + WRITTEN, {**ROW, **AMAX}
    ),
    "tensor, both, amax": Work(
        quantize_tensor_kernel(QUADS, "e4m3", True, True, True), 0.29, READ + 2 * WRITTEN, {**BOTH, **AMAX}
    ),
    "rows, row": Work(quantize_rows_kernel(OCTETS, "e4m3", True, False), 0.25, READ + WRITTEN, {**ROW, "SHFL.IDX": 8}),
    "rows, both": Work(
        quantize_rows_kernel(QUADS, "e4m3", True, True), 0.37, READ + 2 * WRITTEN, {**TWICE, "SHFL.IDX": 16}
    ),
    "columns' scales, row": Work(
        quantize_columns_kernel(OCTETS, "e4m3"), 0.26, READ + WRITTEN, {**ROW, "LDG.E.NA*": 8 + 8}
    ),
    "transpose": Work(transpose_kernel(4), 0.23, 2 * WRITTEN, {"LDG.E.NA*": 16, "PRMT*": 32, **COLUMNS}),
    # One more store of four bytes, in two more for both: the scales.
    "1x128, row": Work(
        quantize_blocks_kernel(QUADS, "e4m3", (1, 128), False, True, False),
        0.43,
        READ + WRITTEN,
        {**LOADS_4, **CASTS, "STG.E": 17, "REDUX*": 16, "SHFL.IDX": 16},
    ),
    "1x128, both": Work(
        quantize_blocks_kernel(QUADS, "e4m3", (1, 128), False, True, True),
        0.53,
        READ + 2 * WRITTEN,
        {**TWICE, "STG.E": 18, "REDUX*": 16, "SHFL.IDX": 16},
    ),
    "128x128, both": Work(
        quantize_blocks_kernel(QUADS, "e4m3", (128, 128), False, True, True),
        0.29,
        READ + 2 * WRITTEN,
        {**BOTH, **AMAX},
    ),
    "1x32, row": Work(
        quantize_blocks_kernel(OCTETS, "e4m3", (1, 32), True, True, False),
        0.37,
        READ + WRITTEN,
        {**ROW, "STG.E.U8": 2},
    ),
    "1x32, both": Work(
        quantize_blocks_kernel(QUADS, "e4m3", (1, 32), True, True, True),
        0.56,
        READ + 2 * WRITTEN,
        {**TWICE, "STG.E.U8": 4},
    ),
    "amax": Work(amax_kernel(OCTETS, False), 0.12, READ, {**LOADS_8, "HMNMX2*": 32}, again=True),
    "amax of rows and columns": Work(
        row_amax_kernel(QUADS, True, True), 0.34, READ, {**LOADS_4, "HMNMX2*": 30 + 16, "REDUX*": 16}
    ),
    # SiLU of 64 elements: an exponential and a reciprocal each. x has twice the columns.
    "SwiGLU, both, amax": Work(
        quantize_tensor_kernel(activation_loader("swiglu", "bfloat16", True), "e4m3", True, True, True),
        0.45,
        2 * READ + 2 * WRITTEN,
        {**BOTH, "LDG.E.NA.64*": 32, "MUFU.EX2": 64, "MUFU.RCP": 64},
    ),
    # Four rows of a block, 64 elements a thread. Arithmetic alone is ten instructions an element, 640 of 780: bfloat16
    # to float32 twice for x and once for the weight, its offset, squares and their sum, three products, amax, cast.
    "RMSNorm, row, amax": Work(
        normalize_kernel(RMS, "e4m3", cast_row_layout("bfloat16", 4096), True),
        0.59,
        4 * 4096 * 3,
        {**ROW, "SHFL.BFLY": 5, "BAR*": 1},
        again=True,
    ),
    "RMSNorm backward": Work(
        norm_backward_kernel(RMS, "bfloat16", backward_row_layout(("bfloat16", "bfloat16"), 4096)),
        0.42,
        4096 * 6,
        {"LDG.E.NA.128*": 4, "STG.E.64": 4, "SHFL.BFLY": 5, "BAR*": 1},
        again=True,
    ),
    # 512 threads of three vectors each: three of x and three of dy.
    "RMSNorm backward of 12,288 columns": Work(
        norm_backward_kernel(RMS, "bfloat16", backward_row_layout(("bfloat16", "bfloat16"), 12288)),
        0.39,
        12288 * 6,
        {"LDG.E.NA.128*": 6, "STG.E.64": 6, "SHFL.BFLY": 5, "BAR*": 1},
        again=True,
    ),
}


@pytest.mark.parametrize("name", covering(WORK, lambda name: {WORK[name].kernel.name} & launched()))
def test_issuing_leaves_memory_its_time(name: str) -> None:
    """Slots × warps / 4 schedulers ≤ 0.6 × bytes / (4.3 TB/s / 132 multiprocessors / 1.755 GHz), on an H200."""
    work = WORK[name]
    slots = (slots_of_another if work.again else issue_slots)(disassembled(compiled(work.kernel, "90a")[1]), work.each)
    share = issue_clocks(slots, work.kernel.threads) / memory_clocks(work.bytes)
    found = f"{slots} instructions of each warp take {share:.0%} of the clocks that memory takes"
    assert share <= min(LIMIT, work.share + MARGIN), found
