"""Clusters in the emulator: addresses that carry a block's rank, and what arrivals release to other blocks.

Rules are named as the PTX ISA's sections are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.samples import needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program

pytestmark = needs_gcc

ONE = (1, 1, 1)
schedules = pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])


@cache
def program(body: str, shared: int) -> Program:
    return Program(ptx("out:u64", body, shared=shared))


def per_block(body: str, blocks: int = 4, shared: int = 64, **options: Any) -> list[int]:
    """What the one thread of each block of a cluster has in %r0 at the end; %r1 is the block's rank."""
    out = torch.zeros(blocks, dtype=torch.int32)
    body = f"""
    mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, memory; mov.u32 %r0, 0;
    {body}
    mul.wide.u32 %d60, %r1, 4; add.u64 %d60, out, %d60; st.global.b32 [%d60], %r0;
    """
    program(body, shared).launch((blocks, 1, 1), ONE, [out], cluster=(blocks, 1, 1), **options)
    return out.tolist()


def fails(message: str, body: str, blocks: int = 4, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        per_block(body, blocks, **options)


# Addresses. ptxas computes a block's own as its rank << 24 plus 0x400: ULEA of SR_CgaCtaId, 0x400 and 0x18.

STEP = "barrier.cluster.arrive; barrier.cluster.wait;"
ELSEWHERE = r"in shared::cta at 0x\d*400, an address of the cluster's block"
NEIGHBOUR = "xor.b32 %r3, %r1, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;"


def test_addresses_carry_the_rank_of_their_block() -> None:
    own = [0x400, 0x1000400, 0x2000400, 0x3000400]
    assert per_block("mov.u32 %r0, %r2;") == own
    assert per_block("mapa.shared::cluster.u32 %r0, %r2, %r1;") == own
    assert per_block("mapa.shared::cluster.u32 %r0, %r2, 2;") == [own[2]] * 4
    assert per_block(f"{NEIGHBOUR} mov.u32 %r0, %r4;") == [own[rank ^ 1] for rank in range(4)]
    generic = "mov.u64 %d0, memory; cvta.shared.u64 %d1, %d0; cvta.to.shared.u64 %d2, %d1; cvt.u32.u64 %r0, %d2;"
    assert per_block(generic) == own
    assert per_block(generic.replace("cvta.to", "mapa.u64 %d1, %d1, 3; cvta.to") + STEP) == [own[3]] * 4


WINDOWS = {
    "st.shared.b32": "st.shared{}.b32 [{}], 5; {} ld.shared.b32 %r0, [%r2];",
    "ld.shared.b32": "st.shared.b32 [%r2], 5; {2} ld.shared{0}.b32 %r0, [{1}];",
    "red.shared.add.u32": "st.shared.b32 [%r2], 4; {2} red.shared{0}.add.u32 [{1}], 1; {2} ld.shared.b32 %r0, [%r2];",
}


@pytest.mark.parametrize("access", WINDOWS)
def test_shared_cta_is_the_window_of_the_own_block(access: str) -> None:
    """State Spaces: .shared without more is .shared::cta, which holds the block's own memory; .shared::cluster all."""
    text = WINDOWS[access]
    for window, address in (("", "%r2"), ("::cta", "%r2"), ("::cluster", "%r2"), ("::cluster", "%r4")):
        assert per_block(f"{NEIGHBOUR} {text.format(window, address, STEP)} {STEP}") == [5] * 4
    for window in ("", "::cta"):
        fails(
            ELSEWHERE,
            NEIGHBOUR + text.format(window, "%r4", STEP),
        )


def test_an_address_without_its_rank_is_the_first_blocks() -> None:
    masked = "and.b32 %r2, %r2, 0xffffff; st.shared{}.b32 [%r2], 5;"
    assert per_block(masked.format(""), 1) == [0]
    fails(r"an address of the cluster's block 0.* \[block \(1", masked.format(""), 2)
    fails("race: .* byte 0 of shared memory", masked.format("::cluster") + STEP, 2)


OWN_ONLY = {
    "mbarrier.init": "mbarrier.init.shared::cta.b64 [%r4], 1;",
    "mbarrier.arrive": "mbarrier.init.shared::cta.b64 [%r2], 1; {} mbarrier.arrive.shared::cta.b64 _, [%r4];",
    "mbarrier.try_wait": "mbarrier.init.shared::cta.b64 [%r2], 1; {} mbarrier.try_wait.shared::cta.b64 %p0, [%r4], 0;",
    "cp.async": "cp.async.ca.shared.global [%r4], [out], 4; cp.async.wait_all;",
    "cp.async.bulk": "cp.async.bulk.global.shared::cta.bulk_group [out], [%r4], 16;",
}


@pytest.mark.parametrize("instruction", OWN_ONLY)
def test_what_takes_no_address_of_another_block(instruction: str) -> None:
    fails(ELSEWHERE, NEIGHBOUR + OWN_ONLY[instruction].format(STEP), shared=64)


def test_a_token_is_given_by_the_own_blocks_mbarriers() -> None:
    """mbarrier.arrive: of an mbarrier in .shared::cluster the state is the sink symbol _."""
    with pytest.raises(EmulatorError, match="a token from an mbarrier of shared::cluster"):
        per_block("mbarrier.arrive.shared::cluster.b64 %d0, [%r2];")


# mbarrier.arrive: .release at the scope of the block, where nothing else is said

# Block 1 writes a word in block 0's memory and arrives there; block 0 waits and reads it.
PASSED_ON = f"""
setp.eq.u32 %p0, %r1, 0; mov.u32 %r9, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster; {STEP}
{NEIGHBOUR}
@%p0 bra WAIT;
st.shared::cluster.b32 [%r4+8], 7;
mbarrier.arrive{{}}.shared::cluster.b64 _, [%r4];
bra END;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r9; @!%p1 bra WAIT;
ld.shared.b32 %r0, [%r2+8];
END:
{STEP}
"""

# Block 1 reads a word of its own and arrives at block 0's mbarrier; block 0 waits and overwrites the word.
HANDED_BACK = f"""
setp.eq.u32 %p0, %r1, 0; mov.u32 %r9, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
@!%p0 st.shared.b32 [%r2+8], 3;
fence.mbarrier_init.release.cluster; {STEP}
{NEIGHBOUR}
@%p0 bra WAIT;
ld.shared.b32 %r0, [%r2+8];
mbarrier.arrive{{}}.shared::cluster.b64 _, [%r4];
bra END;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r9; @!%p1 bra WAIT;
st.shared::cluster.b32 [%r4+8], 9;
END:
{STEP}
"""


@schedules
def test_a_release_to_the_cluster_passes_on_what_was_written(schedule: Any) -> None:
    assert per_block(PASSED_ON.format(".release.cluster"), 2, schedule=schedule) == [7, 0]
    assert per_block(HANDED_BACK.format(".release.cluster"), 2, schedule=schedule) == [0, 3]


@pytest.mark.parametrize("form", ["", ".release.cta"])
@schedules
def test_a_release_to_the_block_hands_back_only_what_was_read(form: str, schedule: Any) -> None:
    """CUTLASS's ClusterBarrier::arrive has this form, for places whose readers are done."""
    assert per_block(HANDED_BACK.format(form), 2, schedule=schedule) == [0, 3]
    fails("race: thread 0 of the cluster's block 0 reads byte 8", PASSED_ON.format(form), 2, schedule=schedule)


@pytest.mark.parametrize("form", [".relaxed.cta", ".relaxed.cluster"])
@schedules
def test_a_relaxed_arrival_releases_nothing(form: str, schedule: Any) -> None:
    fails("race: thread 0 of the cluster's block 0 writes byte 8", HANDED_BACK.format(form), 2, schedule=schedule)
    fails("race: thread 0 of the cluster's block 0 reads byte 8", PASSED_ON.format(form), 2, schedule=schedule)


def test_a_relaxed_wait_acquires_nothing() -> None:
    text = PASSED_ON.format(".release.cluster")
    fails("race: .* reads byte 8", text.replace("try_wait.parity", "try_wait.parity.relaxed.cluster"), 2)
    assert per_block(text.replace("try_wait.parity", "try_wait.parity.acquire.cluster"), 2) == [7, 0]


# barrier.cluster: a relaxed arrival after fence.mbarrier_init


@schedules
def test_initialized_mbarriers_are_known_after_a_relaxed_arrival(schedule: Any) -> None:
    """fence.mbarrier_init orders mbarrier.init, and nothing else, before what follows in the cluster."""
    text = PASSED_ON.format(".release.cluster")
    relaxed = text.replace("barrier.cluster.arrive;", "barrier.cluster.arrive.relaxed;", 1)
    assert per_block(relaxed, 2, schedule=schedule) == [7, 0]
    unfenced = relaxed.replace("fence.mbarrier_init.release.cluster;", "")
    fails("race: .* reads byte 0 .* which thread 0 of the cluster's block 0 wrote", unfenced, 2, schedule="forward")


@schedules
def test_a_relaxed_arrival_passes_on_nothing_else(schedule: Any) -> None:
    text = HANDED_BACK.format(".release.cluster").replace("arrive;", "arrive.relaxed;", 1)
    text = text.replace("ld.shared.b32 %r0, [%r2+8];", "").replace(
        "@%p0 bra WAIT;", "@%p0 ld.shared::cluster.b32 %r0, [%r4+8]; @%p0 bra WAIT;"
    )
    fails(
        "race: .* reads byte 8 .* which thread 0 of the cluster's block 1 wrote|race: .* writes byte 8",
        text,
        2,
        schedule=schedule,
    )
