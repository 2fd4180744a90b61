"""What threads and blocks say to each other in the emulator: atomics, clusters, mbarriers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulator.samples import needs_gcc
from tests.emulator.threads.bodies import ONE, fails, per_thread, program, schedules
from tests.ptx_on_cpu import EmulatorError

pytestmark = needs_gcc


# Atomics on shared memory


@schedules
def test_atomics_do_not_race_with_each_other(schedule: Any) -> None:
    body = """
    mov.u32 %r3, memory; setp.eq.u32 %p0, %r1, 0; @%p0 st.shared.b32 [%r3], 0; bar.sync 0;
    red.shared.add.u32 [%r3], %r1; {}
    ld.shared.b32 %r0, [%r3];
    """
    assert per_thread(body.format("bar.sync 0;"), 64, 16, schedule=schedule) == [63 * 32] * 64
    fails("race", body.format(""), 64, 16, schedule=schedule)
    fails("race", body.format("bar.sync 0; red.shared.add.u32 [%r3], 1;"), 64, 16, schedule=schedule)


@schedules
def test_an_atomic_and_a_plain_access_race(schedule: Any) -> None:
    """Thread 0 updates, thread 32 accesses: whichever comes first."""
    body = """
    mov.u32 %r0, 0; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r1, 32;
    @%p0 red.shared.add.u32 [memory], 1; {} @%p1 {};
    """
    for access in ("ld.shared.b32 %r0, [memory]", "st.shared.b32 [memory], 7"):
        fails("race: thread (0|32) ", body.format("", access), 64, 16, schedule=schedule)
        assert len(per_thread(body.format("bar.sync 0;", access), 64, 16, schedule=schedule)) == 64
    assert len(per_thread(body.format("", "red.shared.add.u32 [memory], 1"), 64, 16, schedule=schedule)) == 64


# Clusters

# Each block writes its rank into the next block's shared memory and reads what the one before wrote into its own.
NEIGHBOURS = """
mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %cluster_nctarank; add.u32 %r3, %r1, 1; rem.u32 %r3, %r3, %r2;
mov.u32 %r4, memory; mapa.shared::cluster.u32 %r5, %r4, %r3;
mov.u32 %r6, %tid.x; shl.b32 %r7, %r6, 2; add.u32 %r5, %r5, %r7; add.u32 %r4, %r4, %r7;
mad.lo.u32 %r8, %r1, 100, %r6;
st.shared::cluster.b32 [%r5], %r8;
{}
ld.shared.b32 %r0, [%r4];
mov.u32 %r9, %ctaid.x; mov.u32 %r10, %ntid.x; mad.lo.u32 %r9, %r9, %r10, %r6;
mul.wide.u32 %d0, %r9, 4; add.u64 %d0, out, %d0; st.global.b32 [%d0], %r0;
"""


@schedules
def test_a_relaxed_arrival_publishes_what_a_fence_released(schedule: Any) -> None:
    """As CUTLASS starts: mbarrier.init, fence.mbarrier_init, and a relaxed arrival at the cluster's barrier."""
    body = """
    mov.u32 %r2, memory; setp.ne.u32 %p0, %r1, 0;
    @!%p0 mbarrier.init.shared.b64 [%r2], 64;
    FENCE
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mbarrier.arrive.shared.b64 _, [%r2];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra WAIT;
    """
    fenced = body.replace("FENCE", "@!%p0 fence.mbarrier_init.release.cluster;")
    assert per_thread(fenced, 64, 16, schedule=schedule) == [0] * 64
    fails("race|never initialised", body.replace("FENCE", ""), 64, 16, schedule=schedule)


CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def neighbours(between: str, schedule: Any) -> list[int]:
    out = torch.zeros(4 * 40, dtype=torch.int32)
    launch = program("out:u64", NEIGHBOURS.format(between), 160).launch
    launch((4, 1, 1), (40, 1, 1), [out], cluster=(4, 1, 1), schedule=schedule)
    return out.tolist()


@schedules
def test_blocks_of_a_cluster_write_to_each_other(schedule: Any) -> None:
    expected = [(block - 1) % 4 * 100 + thread for block in range(4) for thread in range(40)]
    assert neighbours(CLUSTER_BARRIER, schedule) == expected


@pytest.mark.parametrize("between", ["", "bar.sync 0;", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"])
@schedules
def test_blocks_of_a_cluster_race_without_their_barrier(between: str, schedule: Any) -> None:
    with pytest.raises(EmulatorError, match="race: thread .* of the cluster's block|which has exited"):
        neighbours(between, schedule)


# The other blocks arrive at an mbarrier of block 0, which then reads what they wrote.
REMOTE_ARRIVALS = """
mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, memory; mov.u32 %r9, 0;
setp.eq.u32 %p0, %r1, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 3;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
@%p0 bra OWNER;
mapa.shared::cluster.u32 %r3, %r2, %r9; mad.lo.u32 %r4, %r1, 8, %r3;
st.shared::cluster.b32 [%r4], %r1;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
bra END;
OWNER:
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], %r9; @!%p1 bra WAIT;
ld.shared.b32 %r5, [%r2+8]; ld.shared.b32 %r6, [%r2+16]; ld.shared.b32 %r7, [%r2+24];
st.global.b32 [out], %r5; st.global.b32 [out+4], %r6; st.global.b32 [out+8], %r7;
END:
barrier.cluster.arrive; barrier.cluster.wait;
"""


def remote_arrivals(text: str, schedule: Any) -> list[int]:
    out = torch.zeros(3, dtype=torch.int32)
    launch = program("out:u64", text, 64).launch
    launch((4, 1, 1), ONE, [out], cluster=(4, 1, 1), schedule=schedule)
    return out.tolist()


@schedules
def test_blocks_of_a_cluster_arrive_at_an_mbarrier(schedule: Any) -> None:
    assert remote_arrivals(REMOTE_ARRIVALS, schedule) == [1, 2, 3]


@schedules
def test_an_mbarrier_needs_its_arrivals(schedule: Any) -> None:
    arrival = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];"
    with pytest.raises(EmulatorError, match=r"deadlock .*mbarrier.try_wait"):
        remote_arrivals(REMOTE_ARRIVALS.replace(arrival, ""), schedule)


def test_an_mbarrier_needs_its_wait() -> None:
    """try_wait may give up: a thread that does not ask again knows nothing."""
    with pytest.raises(EmulatorError, match="race: thread 0 of the cluster's block 0 reads"):
        remote_arrivals(REMOTE_ARRIVALS.replace("@!%p1 bra WAIT;", ""), "forward")


# mbarriers of a block

RING = """
mov.u32 %r2, memory; setp.eq.u32 %p0, %r1, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 32;
bar.sync 0;
setp.lt.u32 %p1, %r1, 32; shl.b32 %r3, %r1, 2; add.u32 %r3, %r3, %r2;
@!%p1 bra READER;
st.shared.b32 [%r3+8], %r1;
mbarrier.arrive.shared::cta.b64 %d0, [%r2];
mov.u32 %r0, 0;
bra END;
READER:
mov.u32 %r4, 0;
WAIT: mbarrier.{}.parity.shared::cta.b64 %p2, [%r2], %r4; @!%p2 bra WAIT;
ld.shared.b32 %r0, [%r3+-120];
END:
"""


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
@schedules
def test_arrivals_at_an_mbarrier_order(wait: str, schedule: Any) -> None:
    expected = [0] * 32 + list(range(32))
    assert per_thread(RING.format(wait), 64, 256, schedule=schedule) == expected


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_a_wait_whose_result_is_ignored_orders_nothing(wait: str) -> None:
    fails("race", RING.format(wait).replace("@!%p2 bra WAIT;", ""), 64, 256, schedule="reverse")


def test_misuse_of_mbarriers() -> None:
    start = "mov.u32 %r0, 0; mov.u32 %r2, memory; "
    init = "mbarrier.init.shared::cta.b64 [%r2], 1; "
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r2]; "
    cases = {
        arrive: "never initialised, or is overwritten",
        init + "st.shared.b32 [%r2], 0; " + arrive: "never initialised, or is overwritten",
        init + "mbarrier.inval.shared::cta.b64 [%r2]; " + arrive: "never initialised",
        "mbarrier.init.shared::cta.b64 [%r2], 0;": "count of 0",
        init + "mbarrier.arrive.shared::cta.b64 _, [%r2], 2;": "more arrivals",
        init + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2000000;": "more than it can count",
        "mbarrier.init.shared::cta.b64 [%r2+4], 1;": "misaligned",
        "WAIT: " + init + "mov.u32 %r3, 0; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r2], %r3; "
        "@!%p0 bra AGAIN;": "deadlock .*mbarrier.try_wait",
    }
    for body, message in cases.items():
        fails(message, start + body, 1, 64)


def test_an_mbarrier_has_phases() -> None:
    """The parity of the phase before the first counts as complete; a token waits for its own phase."""
    body = """
    mov.u32 %r2, memory; mbarrier.init.shared::cta.b64 [%r2], 2; mov.u32 %r0, 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p0, [%r2], 1; @%p0 add.u32 %r0, %r0, 1;
    mbarrier.test_wait.parity.shared::cta.b64 %p0, [%r2], 0; @%p0 add.u32 %r0, %r0, 10;
    mbarrier.arrive.shared::cta.b64 %d0, [%r2];
    mbarrier.test_wait.shared::cta.b64 %p0, [%r2], %d0; @%p0 add.u32 %r0, %r0, 100;
    mbarrier.arrive.shared::cta.b64 %d1, [%r2];
    mbarrier.test_wait.shared::cta.b64 %p0, [%r2], %d0; @%p0 add.u32 %r0, %r0, 1000;
    mbarrier.arrive.shared::cta.b64 %d1, [%r2], 2;
    mbarrier.test_wait.parity.shared::cta.b64 %p0, [%r2], 1; @%p0 add.u32 %r0, %r0, 10000;
    """
    assert per_thread(body, 1, 64) == [11001]
