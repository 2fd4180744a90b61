"""The model of two warps, on loops whose clocks are worked out by hand; and attention's loops, by it and by order."""

from __future__ import annotations

import re

import pytest

from cuda_kernels.attention.backward.dkv import attention_dkv_kernel
from cuda_kernels.attention.backward.dq import attention_dq_kernel
from cuda_kernels.attention.forward import attention_forward_kernel
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.kernel import Kernel
from tests.cuda_kernels.emulated import needs_compilers
from tests.machine_code import sass, two_warps
from tests.machine_code.compiled import code_of
from tests.machine_code.two_warps import clocks_of_a_round
from tests.tiers import thorough

PRODUCT = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0"
FROM_REGISTERS = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R88, gdesc[UR8], R24, gsb0"
WAIT, WAIT_OLDER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
POWERS = [f"MUFU.EX2 R{index}, R{index}" for index in range(200, 216)]


def loop(*lines: str) -> list[sass.Instruction]:
    """A loop of ``lines`` around which there is nothing."""
    text = ["MOV R2, R2", ".L_x_1:", *lines, "@P0 BRA `(.L_x_1)", "EXIT"]
    return sass.parsed("\n".join(line if line.startswith(".L") else f"/*0000*/ {line} ;" for line in text))


@pytest.mark.parametrize(
    ("lines", "alone", "together"),
    [
        # 64 × 128 × 32 multiply-adds on four tensor cores with 1024 a clock; a wait and a branch come on top.
        ([PRODUCT, WAIT], 64 + two_warps.DONE + 2, 128),
        # Waited for a round later, nothing but the product counts.
        ([PRODUCT, WAIT_OLDER], 64, 128),
        # A quarter of 16 exponentials a clock of a multiprocessor: 8 clocks for a warp's 32.
        ([PRODUCT, *POWERS, WAIT], 128 + 3, 256),
        # A chain of sums, four clocks each, and of another warp between them.
        ([PRODUCT, *["FADD R4, R4, R5"] * 32, WAIT], 128 + 3, 128 + 6),
        # Independent sums: one a clock.
        ([PRODUCT, *(f"FADD R{index}, R5, R6" for index in range(200, 232)), *POWERS, WAIT], 128 + 35, 256),
        # What is done once in a while lies beside the shortest way.
        ([PRODUCT, "@P1 BRA `(.L_x_2)", *POWERS, *POWERS, ".L_x_2:", WAIT_OLDER], 64, 128),
        # A product from registers starts when they are there.
        (["MUFU.EX2 R91, R5", FROM_REGISTERS, WAIT], 25 + 64 + two_warps.DONE, 128),
    ],
)
def test_clocks_by_hand(lines: list[str], alone: int, together: int) -> None:
    code = loop(*lines)
    assert clocks_of_a_round(code, 1) == pytest.approx(alone, abs=8)
    assert clocks_of_a_round(code, 2) == pytest.approx(together, abs=16)


def test_turns_keep_exponentials_apart() -> None:
    """One warp's are done in 128 clocks, then the other's; without turns both would end together."""
    turns = loop("BAR.SYNC R8, 0x100", *POWERS, "BAR.ARV R9, 0x100", PRODUCT, WAIT)
    assert clocks_of_a_round(turns, 2) == pytest.approx(2 * (128 + two_warps.MET), abs=16)


# --- Attention --------------------------------------------------------------------------------------------------------

WIDE = AttentionSpec(128, "bfloat16")
FORWARD, DKV, DQ = attention_forward_kernel(WIDE), attention_dkv_kernel(WIDE), attention_dq_kernel(WIDE)


def names_of_a_round(kernel: Kernel) -> list[str]:
    """Instructions with their operands, of the usual round of the loop."""
    code = code_of(kernel)
    (step,) = sass.steps(code)
    assert not {code[index].opcode for index in step} & {*sass.LOCAL_MEMORY}
    return [f"{each.name} {each.operands}" for each in two_warps.usual_round(code, step)]


def places(names: list[str], word: str) -> list[int]:
    return [place for place, name in enumerate(names) if word in name]


def is_from_registers(product: str) -> bool:
    """Whether its A is: P and dS, where the operands of scores and dP are all in shared memory."""
    return bool(re.search(r"R\d+, R\d+, gdesc", product))


@thorough
@needs_compilers
def test_forward_of_128_channels_multiplies_while_it_computes() -> None:
    """The next tile's scores are issued before the exponentials of this one, but for some that the assembler moves up
    in front of the turn; and the product with V is waited for behind the next tile's maxima."""
    names = names_of_a_round(FORWARD)
    products, exponentials, maxima = places(names, "QGMMA"), places(names, "MUFU.EX2"), places(names, "FMNMX")
    taken, given, waits = places(names, "BAR.SYNC"), places(names, "BAR.ARV"), places(names, "DEPBAR")
    assert [is_from_registers(names[place]) for place in products] == 2 * ([False] * 4 + [True] * 4)
    for tile in range(2):
        scores, part = products[8 * tile], products[8 * tile + 4]
        for_scores, for_part = waits[2 * tile : 2 * tile + 2]
        before = waits[1] if tile else 0
        own = [place for place in exponentials if before < place < part]
        assert taken[tile] < scores < given[tile] < part < for_scores < for_part
        assert len(own) >= 64
        assert max(own) < given[tile]
        assert sum(scores < place for place in own) >= 40
        assert "0x1" in names[for_scores]
        assert "0x0" in names[for_part]
        assert sum(for_scores < place < for_part for place in maxima) >= 62, "of 32 scores of two rows each"


@thorough
@needs_compilers
def test_dkv_multiplies_ds_with_q_during_the_next_tile() -> None:
    """Scores, dK of the last tile and dP are issued together, and exponentials wait for the scores alone."""
    names = names_of_a_round(DKV)
    products, exponentials, waits = places(names, "QGMMA"), places(names, "MUFU.EX2"), places(names, "DEPBAR")
    assert [is_from_registers(names[place]) for place in products] == [False] * 4 + [True] * 2 + [False] * 4 + [
        True
    ] * 2
    assert products[9] < waits[0] < exponentials[0] < exponentials[31] < products[10] < waits[1]
    assert "0x2" in names[waits[0]]
    assert "0x1" in names[waits[1]]


@thorough
@needs_compilers
def test_dq_multiplies_during_the_next_tile() -> None:
    """Scores of the next tile are issued before this tile's codes of dS, and waited for behind its product with K; the
    product for dP is issued before the exponentials."""
    names = names_of_a_round(DQ)
    products, exponentials, waits = places(names, "QGMMA"), places(names, "MUFU.EX2"), places(names, "DEPBAR")
    codes = places(names, "F2FP.SATFINITE.E4M3")
    assert [is_from_registers(names[place]) for place in products] == [False] * 4 + [True] * 4 + [False] * 4
    assert waits[0] < products[0] < codes[0] < codes[-1] < products[4] < waits[1] < waits[2] < products[8]
    assert ["0x0" in names[place] for place in waits] == [True, False, True]
    assert sum(products[8] < place for place in exponentials) >= 60


NARROW = attention_forward_kernel(AttentionSpec(64, "bfloat16"))
CLOCKS = {
    "forward": (FORWARD, 2, (1603, 2028), (1111, 1393)),
    "forward of 64 channels": (NARROW, 1, (1330, 1814), (1334, 1470)),
    "dkv": (DKV, 1, (1267, 1419), (951, 1167)),
    "dq": (DQ, 1, (1910, 2953), (1516, 1722)),
    "dq of 64 channels": (attention_dq_kernel(AttentionSpec(64, "bfloat16")), 1, (1417, 1644), (1312, 1808)),
}
"""Tiles of a round; then the model's clocks of a tile, of one warpgroup alone and of both: before and after.

Before, each product was waited for in its own tile, and turns were given before the maxima (commit 54aa829; dQ:
00f5020). At 64 channels those of dQ of both are 1,531 to 1,808, by how far the warpgroups are apart; before, 1,644.
"""


@thorough
@needs_compilers
@pytest.mark.parametrize("name", CLOCKS)
def test_the_models_clocks(name: str) -> None:
    """A compiler may schedule a little worse than the one that these were counted with."""
    kernel, tiles, _, written = CLOCKS[name]
    for warps, clocks in zip((1, 2), written):
        assert clocks_of_a_round(code_of(kernel), warps) / tiles <= 1.03 * clocks
