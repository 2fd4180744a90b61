"""The lint of machine code, on listings made by hand; and scales are read while tensor cores multiply."""

from __future__ import annotations

import pytest

from cuda_kernels.host.launch import Kernel
from tests.cuda_kernels.cases.all_cases import tiered_kernels
from tests.machine_code import sass
from tests.machine_code.compiled import code_of
from tests.machine_code.test_compiled_kernels import PRODUCTS


@pytest.mark.parametrize(
    "kernel",
    tiered_kernels(each for each in PRODUCTS if each.name.startswith("gemm") and "1x128*" in each.name),
    ids=lambda kernel: kernel.name,
)
def test_scales_are_read_before_the_products_are_done(kernel: Kernel) -> None:
    """Those in shared memory; only where each column has one and registers are few, those are read afterwards."""
    code = code_of(kernel, "90a")
    (step,) = sass.steps(code)
    after = sass.successors(code)
    counts = [sass.products_until_read(code, after, step, at) for at in step if code[at].opcode == "LDS"]
    smem_or_even = "smem_epilogue" in kernel.name or " even" in kernel.name
    few_sums = " 128x128 mma_warpgroups=2 waves=1 " in kernel.name
    early = "1x128*128x128" in kernel.name or (few_sums and smem_or_even)
    assert len(counts) >= 2
    assert (all if early else any)(counts)


@pytest.mark.parametrize(
    ("load", "reader"),
    [
        ("LDG.E R6, desc[UR4][R2.64]", "IADD3 R9, R6, 0x1, RZ"),
        ("LDG.E.64 R6, desc[UR4][R2.64]", "IADD3 R9, R7, 0x1, RZ"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "IADD3 R9, R7, 0x1, RZ"),
        ("LDG.E R7, desc[UR4][R2.64]", "IMAD.WIDE R8, R9, 0x4, R6"),
        ("LDG.E R7, desc[UR4][R2.64]", "LDG.E R9, desc[UR4][R6.64]"),
        ("LDG.E R7, desc[UR4][R2.64]", "STG.E.64 desc[UR4][R2.64], R6"),
    ],
)
def test_who_reads_what_was_loaded(load: str, reader: str) -> None:
    """Pairs and fours of registers are named by their first one (nvdisasm's listing of 64- and 128-bit operands)."""

    def products(*lines: str) -> int | None:
        text = "".join(f"        /*{16 * index:04x}*/  {line} ;\n" for index, line in enumerate(lines))
        code = sass.parsed(text)
        return sass.products_until_read(code, sass.successors(code), frozenset(range(len(code))), 0)

    product = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], R24, gsb0"
    assert products(load, reader, product, "EXIT") == 0
    assert products(load, product, reader, "EXIT") == 1
    assert products(load, "IADD3 R9, R20, 0x1, RZ", product, "EXIT") is None


# The lint. Of the loop that multiplies, the wait for its place lies behind the exit, as the assembler puts it.

STEP = """
        /*0000*/                   MOV R2, c[0x0][0x210] ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_8) ;
.L_x_2:
        /*0040*/                   WARPGROUP.ARRIVE ;
{first}
        /*0050*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT ;
        /*0060*/                   UIADD3 UR8, UR8, 0x2, URZ ;
{second}
        /*0070*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24 ;
        /*0080*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24 ;
        /*0090*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24, gsb0 ;
        /*00a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
{then}
        /*00b0*/                   FADD R100, R100, R24 ;
        /*00c0*/               @P1 BRA `(.L_x_1) ;
.L_x_9:
{after}
        /*00d0*/                   EXIT ;
.L_x_8:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*00f0*/              @!P0 BRA `(.L_x_8) ;
        /*0100*/                   BRA `(.L_x_2) ;
.L_x_7:
        /*0110*/                   BRA `(.L_x_7);
"""


def step(first: str = "", second: str = "", then: str = "", after: str = "") -> list[sass.Instruction]:
    lines = {"first": first, "second": second, "then": then, "after": after}
    return sass.parsed(
        STEP.format(**{at: "\n".join(f"/*0000*/ {x} ;" for x in line.split(";") if x) for at, line in lines.items()})
    )


def test_a_listing() -> None:
    code = step(first="@!P3 LDG.E R7, desc[UR4][R2.64+0x10]")
    assert code[5] == sass.Instruction("!P3", "LDG.E", "R7, desc[UR4][R2.64+0x10]")
    assert code[1] == sass.Instruction("!P0", "BRA", "`(.L_x_9)", 14)
    assert [each.opcode for each in code].count("QGMMA") == 4
    assert code[-1].target == len(code) - 1


def test_the_loops_of_a_listing() -> None:
    """The wait that lies behind the exit is one of its own, and with its way back belongs to the step."""
    inner, outer = sorted(sass.loops(step()), key=len)
    assert inner == {14, 15}
    assert outer == {*range(2, 13), 14, 15, 16}
    assert sass.steps(step()) == [outer]
    assert [*sass.faults_of_steps(step())] == []
    two_entries = STEP.replace("`(.L_x_9)", "`(.L_x_3)", 1).replace("{second}", ".L_x_3:\n{second}")
    with pytest.raises(ValueError, match="a loop is entered at .* and elsewhere"):
        sass.loops(sass.parsed(two_entries.format(first="", second="", then="", after="")))
    with pytest.raises(ValueError, match="BRX R2 -0x10 goes where registers say"):
        step(then="BRX R2 -0x10")


@pytest.mark.parametrize("barrier", ["MEMBAR.ALL.GPU", "@!P0 MEMBAR.SC.GPU", "MEMBAR.SC.SYS", "ERRBAR"])
def test_gpu_wide_barriers(barrier: str) -> None:
    assert sass.gpu_wide_barriers(step(then=barrier)) == [f"{barrier.removeprefix('@!P0 ')} in a loop"]
    assert not sass.gpu_wide_barriers(step(after=barrier))
    assert not sass.gpu_wide_barriers(step(then="MEMBAR.ALL.CTA"))


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ({"then": "LDL R3, [R1+0x10]"}, "LDL R3, [R1+0x10]: local memory"),
        ({"first": "@P2 STL.64 [R1], R4"}, "STL.64 [R1], R4: local memory"),
        ({"second": "BAR.SYNC.DEFER_BLOCKING 0x0"}, "BAR.SYNC.DEFER_BLOCKING 0x0 between products"),
        ({"second": "WARPGROUP.DEPBAR.LE gsb0, 0x0"}, "WARPGROUP.DEPBAR.LE gsb0, 0x0 between products"),
        ({"second": "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24"}, "5 products in a group"),
        ({"second": "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0"}, "2 products in a group"),
        ({"then": "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24"}, "1 products in no group"),
        # Read in the same step.
        (
            {"second": "LDG.E R7, desc[UR4][R2.64]", "then": "FMUL R8, R9, R7"},
            "LDG.E R7, desc[UR4][R2.64]: read after 3 of a step's 4 products",
        ),
        (
            {"first": "@!P0 LDG.E.64 R7, desc[UR4][R2.64]", "second": "R2UR UR9, R7"},
            "LDG.E.64 R7, desc[UR4][R2.64]: read after 1 of a step's 4 products",
        ),
        ({"second": "LD.E R7, [R2]; STS [R9], R7"}, "LD.E R7, [R2]: read after 0 of a step's 4 products"),
        # In the next, but before what has not been multiplied yet.
        (
            {"first": "IADD3 R2, R2, R7, RZ", "then": "LDG.E R7, desc[UR4][R2.64]"},
            "LDG.E R7, desc[UR4][R2.64]: read after 0 of a step's 4 products",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_of_a_step(where: dict[str, str], fault: str) -> None:
    assert fault in [*sass.faults_of_steps(step(**where))]


@pytest.mark.parametrize(
    "where",
    [
        {"first": "LDG.E R7, desc[UR4][R2.64]", "then": "FMUL R8, R9, R7"},  # a whole step ahead
        {"second": "LDG.E R7, desc[UR4][R2.64]", "first": "FMUL R8, R9, R6", "then": "FADD R70, R71, R72"},
        {"second": "LDG.E R7, desc[UR4][R2.64]; MOV R7, RZ", "then": "FMUL R8, R9, R7"},  # another value
        {"first": "LDS R7, [R2]", "second": "FMUL R8, R9, R7"},
        {"first": "LDGSTS.E.BYPASS.128 [R7], [R2.64]"},
        {"after": "LDG.E R7, desc[UR4][R2.64]; FMUL R8, R9, R7; STL [R1], R8"},
    ],
)
def test_what_is_no_fault_of_a_step(where: dict[str, str]) -> None:
    assert [*sass.faults_of_steps(step(**where))] == []
