"""Threads together in the emulator: warps, barriers, clusters, and the races that they prevent."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.ptx_on_cpu_samples import needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program

pytestmark = needs_gcc

ONE, WARP = (1, 1, 1), (32, 1, 1)
ALL = "0xffffffff"
schedules = pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])


@cache
def program(parameters: str, body: str, shared: int = 0) -> Program:
    return Program(ptx(parameters, body, shared=shared))


def per_thread(body: str, threads: int = 32, shared: int = 0, **options: Any) -> list[int]:
    """What each thread of a block has in %r0 at the end; %r1 is its number."""
    out = torch.zeros(threads, dtype=torch.int32)
    body = f"""
    mov.u32 %r1, %tid.x;
    {body}
    mul.wide.u32 %d60, %r1, 4; add.u64 %d60, out, %d60; st.global.b32 [%d60], %r0;
    """
    program("out:u64", body, shared).launch(ONE, (threads, 1, 1), [out], **options)
    return out.tolist()


def fails(message: str, body: str, threads: int = 32, shared: int = 0, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        per_thread(body, threads, shared, **options)


# Warps


def test_shuffles() -> None:
    def result(mode: str, operand: int, clamp: int) -> list[int]:
        return per_thread(f"add.u32 %r2, %r1, 100; shfl.sync.{mode}.b32 %r0, %r2, {operand}, {clamp}, {ALL};")

    lanes = range(32)
    assert result("idx", 5, 31) == [105] * 32
    assert result("bfly", 3, 31) == [100 + (lane ^ 3) for lane in lanes]
    assert result("up", 4, 0) == [100 + (lane - 4 if lane >= 4 else lane) for lane in lanes]
    assert result("down", 4, 31) == [100 + (lane + 4 if lane + 4 < 32 else lane) for lane in lanes]
    # Segments of 8 lanes: the upper bits of the clamp operand
    assert result("idx", 5, 0x181F) == [100 + lane // 8 * 8 + 5 for lane in lanes]
    assert result("down", 2, 0x181F) == [100 + (lane + 2 if lane % 8 < 6 else lane) for lane in lanes]
    assert result("up", 2, 0x1800) == [100 + (lane - 2 if lane % 8 >= 2 else lane) for lane in lanes]


def test_a_shuffle_tells_whether_its_source_is_in_range() -> None:
    body = f"shfl.sync.down.b32 %r2|%p0, %r1, 30, 31, {ALL}; selp.b32 %r0, 1, 0, %p0;"
    assert per_thread(body) == [1, 1] + [0] * 30


VOTES: dict[str, Callable[[list[int]], int]] = {
    "add.u32": lambda xs: sum(xs) % 2**32,
    "min.s32": lambda xs: min(x - 2**32 if x >> 31 else x for x in xs) % 2**32,
    "max.s32": lambda xs: max(x - 2**32 if x >> 31 else x for x in xs) % 2**32,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda xs: xs[0] & xs[1] & xs[2] & xs[3],
    "or.b32": lambda xs: xs[0] | xs[1] | xs[2] | xs[3],
    "xor.b32": lambda xs: xs[0] ^ xs[1] ^ xs[2] ^ xs[3],
}


@pytest.mark.parametrize("operation", VOTES)
def test_redux_of_each_mask_of_lanes(operation: str) -> None:
    """Lanes 4 j to 4 j + 3 reduce hashed lane numbers among themselves."""
    body = f"""
    mul.lo.u32 %r2, %r1, 2654435761; and.b32 %r3, %r1, 28; shl.b32 %r4, 15, %r3;
    redux.sync.{operation} %r0, %r2, %r4;
    """
    hashed = [lane * 2654435761 % 2**32 for lane in range(32)]
    expected = [VOTES[operation](hashed[lane // 4 * 4 : lane // 4 * 4 + 4]) for lane in range(32)]
    assert [x % 2**32 for x in per_thread(body)] == expected


def test_votes_and_matches() -> None:
    odd = "and.b32 %r2, %r1, 1; setp.eq.u32 %p0, %r2, 1;"
    assert per_thread(f"{odd} vote.sync.ballot.b32 %r0, %p0, {ALL};") == [0xAAAAAAAA - 2**32] * 32
    for name, expected in (("all", 0), ("any", 1), ("uni", 0)):
        vote = f"vote.sync.{name}.pred %p1, %p0, {ALL}; selp.b32 %r0, 1, 0, %p1;"
        assert per_thread(odd + vote) == [expected] * 32
    body = f"and.b32 %r2, %r1, 3; match.any.sync.b32 %r0, %r2, {ALL};"
    assert [x % 2**32 for x in per_thread(body)] == [0x11111111 << lane % 4 for lane in range(32)]


def test_one_lane_is_elected() -> None:
    body = f"mov.u32 %r0, 0; elect.sync %r2|%p0, {ALL}; @%p0 mov.u32 %r0, 1; add.u32 %r0, %r0, %r2;"
    elected = per_thread(body)
    leader = min(elected)
    assert sorted(x - leader for x in elected) == [0] * 31 + [1]


DIVERGENCE = {
    "a mask without the lane": (
        "setp.lt.u32 %p0, %r1, 16; shfl.sync.idx.b32 %r0, %r1, 0, 31, 0xffff;",
        "leaves it out",
    ),
    "a lane that exited": (
        f"setp.eq.u32 %p0, %r1, 0; @%p0 exit; bar.warp.sync 0xfffffffe; bar.warp.sync {ALL};",
        "that exited or never were",
    ),
    "two instructions": (
        f"setp.lt.u32 %p0, %r1, 16; @%p0 bra HALF;\nbar.warp.sync {ALL}; bra END; HALF:\nbar.warp.sync {ALL}; END:",
        "lanes of one warp are at the .sync instructions of",
    ),
    "overlapping masks": (
        "setp.lt.u32 %p0, %r1, 16; @%p0 bar.warp.sync 0x1ffff; @!%p0 bar.warp.sync 0xffff8000;",
        "wait for each other",
    ),
    "two barriers": (
        "setp.lt.u32 %p0, %r1, 16; @%p0 bra HALF;\nbar.sync 0; bra END; HALF:\nbar.sync 0; END:",
        "lanes of one warp are at the aligned instructions of",
    ),
}


@pytest.mark.parametrize("case", DIVERGENCE)
@schedules
def test_divergence_is_an_error(case: str, schedule: Any) -> None:
    body, message = DIVERGENCE[case]
    fails(message, f"mov.u32 %r0, 0; {body}", schedule=schedule)


# Barriers of a block

# Each thread writes a word and reads the one of a thread of another warp.
EXCHANGE = """
shl.b32 %r2, %r1, 2; mov.u32 %r3, memory; add.u32 %r2, %r2, %r3; st.shared.b32 [%r2], %r1;
{}
xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.u32 %r4, %r4, %r3; ld.shared.b32 %r0, [%r4];
"""
ORDERED = [
    "bar.sync 0;",
    "barrier.sync 0;",
    "barrier.cta.sync.aligned 3, 64;",
    "bar.sync 1, 64;",
    "bar.red.popc.u32 %r9, 0, 1;",
    "bar.red.and.pred %p9, 2, 64, 1;",
    "barrier.cluster.arrive; barrier.cluster.wait;",
]
UNORDERED = [
    "",
    f"bar.warp.sync {ALL};",
    f"shfl.sync.idx.b32 %r9, %r1, 0, 31, {ALL};",
    "membar.cta;",
    "fence.acq_rel.cta;",
    "shr.u32 %r9, %r1, 5; bar.sync %r9, 32;",
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait;",
]


@pytest.mark.parametrize("barrier", ORDERED)
@schedules
def test_barriers_order_a_block(barrier: str, schedule: Any) -> None:
    assert per_thread(EXCHANGE.format(barrier), 64, 256, schedule=schedule) == [t ^ 32 for t in range(64)]


@pytest.mark.parametrize("barrier", UNORDERED)
@schedules
def test_what_is_no_barrier_leaves_a_race(barrier: str, schedule: Any) -> None:
    fails("race: thread .* shared memory, which thread", EXCHANGE.format(barrier), 64, 256, schedule=schedule)


def test_races_are_looked_for_only_on_demand() -> None:
    assert per_thread(EXCHANGE.format(""), 64, 256, races=False)[32:] == list(range(32))


@schedules
def test_a_warp_is_ordered_by_its_barrier_not_by_shuffles(schedule: Any) -> None:
    body = EXCHANGE.replace("xor.b32 %r4, %r1, 32", "xor.b32 %r4, %r1, 1")
    ordered = body.format(f"bar.warp.sync {ALL};")
    assert per_thread(ordered, 32, 128, schedule=schedule) == [t ^ 1 for t in range(32)]
    fails("race", body.format(f"shfl.sync.idx.b32 %r9, %r1, 0, 31, {ALL};"), 32, 128, schedule=schedule)


@schedules
def test_threads_may_store_copies_of_one_value(schedule: Any) -> None:
    """If asked, as where a layout holds each element more than once; other values and other instructions race."""
    body = "mov.u32 %r3, memory; mov.u32 %r2, {}; st.shared.b32 [%r3], %r2; {} bar.sync 0; ld.shared.b32 %r0, [%r3];"
    loose: dict[str, Any] = {"schedule": schedule, "strict": False}
    assert per_thread(body.format("7", ""), 64, 16, **loose) == [7] * 64
    fails("race: thread .* writes", body.format("7", ""), 64, 16, schedule=schedule)
    fails("race: thread .* writes", body.format("%r1", ""), 64, 16, **loose)
    fails("race: thread .* writes", body.format("7", "st.shared.b32 [%r3], 8;"), 64, 16, **loose)


@schedules
def test_overwriting_what_others_may_still_read_is_a_race(schedule: Any) -> None:
    once = EXCHANGE.format("bar.sync 0;")
    again = "st.shared.b32 [%r2], 0;"
    assert per_thread(f"{once} bar.sync 0; {again}", 64, 256, schedule=schedule) == [t ^ 32 for t in range(64)]
    fails("may still be reading|wrote", f"{once} {again}", 64, 256, schedule=schedule)


# Warp 0 produces for warp 1, which hands the place back; barrier 1 says full, barrier 2 empty.
PRODUCER_CONSUMER = """
and.b32 %r2, %r1, 31; shl.b32 %r2, %r2, 2; mov.u32 %r3, memory; add.u32 %r2, %r2, %r3;
setp.lt.u32 %p0, %r1, 32; mov.u32 %r0, 0; mov.u32 %r5, 0;
@!%p0 bra CONSUMER;
PRODUCE:
bar.sync 2, 64;
add.u32 %r6, %r1, %r5; st.shared.b32 [%r2], %r6;
bar.arrive 1, 64;
add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5; @%p1 bra PRODUCE;
bra END;
CONSUMER:
bar.arrive 2, 64;
CONSUME:
bar.sync 1, 64;
ld.shared.b32 %r6, [%r2]; add.u32 %r0, %r0, %r6;
add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5;
@%p1 bar.arrive 2, 64;
@%p1 bra CONSUME;
END:
"""


@schedules
def test_a_producer_and_a_consumer_alternate(schedule: Any) -> None:
    expected = [0] * 32 + [5 * lane + 10 for lane in range(32)]
    assert per_thread(PRODUCER_CONSUMER, 64, 128, schedule=schedule) == expected


@pytest.mark.parametrize("line", [i for i, x in enumerate(PRODUCER_CONSUMER.split("\n")) if "bar." in x])
@schedules
def test_a_producer_and_a_consumer_need_each_of_their_barriers(line: int, schedule: Any) -> None:
    lines = PRODUCER_CONSUMER.split("\n")
    fails("race|deadlock|wait", "\n".join([*lines[:line], *lines[line + 1 :]]), 64, 128, schedule=schedule)


def test_reductions_of_barriers() -> None:
    body = "setp.lt.u32 %p0, %r1, {}; bar.red.{} 0, %p0; {}"
    assert per_thread(body.format(40, "popc.u32 %r0,", ""), 64) == [40] * 64
    as_word = "selp.b32 %r0, 1, 0, %p1;"
    assert per_thread(body.format(40, "and.pred %p1,", as_word), 64) == [0] * 64
    assert per_thread(body.format(64, "and.pred %p1,", as_word), 64) == [1] * 64
    assert per_thread(body.format(1, "or.pred %p1,", as_word), 64) == [1] * 64
    assert per_thread(body.format(0, "or.pred %p1,", as_word), 64) == [0] * 64


def test_a_barrier_waits_for_the_threads_that_are_left() -> None:
    body = f"setp.ge.u32 %p0, %r1, 80; @%p0 exit; {EXCHANGE.format('bar.sync 0;')}"
    assert per_thread(body, 96, 512)[:64] == [t ^ 32 for t in range(64)]


@schedules
def test_deadlocks_are_reported(schedule: Any) -> None:
    half = "mov.u32 %r0, 0; setp.lt.u32 %p0, %r1, 32; @%p0 {}"
    waiting = "deadlock .*threads 0-31 wait for barrier 1 at PTX line .*; threads 32-63 have exited"
    fails(waiting, half.format("bar.sync 1, 64;"), 64, schedule=schedule)
    fails(
        "deadlock .*barrier.cluster.wait",
        half.format(
            "bra END; barrier.cluster.arrive; barrier.cluster.wait; "
            "LOOP: nanosleep.u32 20; bra LOOP; END: nanosleep.u32 1; bra END;"
        ),
        64,
        schedule=schedule,
    )


def test_a_barrier_has_one_count() -> None:
    body = "mov.u32 %r0, 0; setp.lt.u32 %p0, %r1, 32; @%p0 bar.sync 1, 64; @!%p0 bar.sync 1, 96;"
    fails("counts of 64 and of 96|counts of 96 and of 64", body, 64)
    fails("no multiple of 32", "mov.u32 %r0, 0; bar.sync 1, 33;", 64)
    fails("barrier 16", "mov.u32 %r0, 16; bar.sync %r0;", 64)


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


# Schedules


def test_schedules_differ_and_seeds_repeat_them() -> None:
    body = "atom.global.inc.u32 %r0, [counter], 1000;"

    def order(**options: Any) -> list[int]:
        text = ptx(
            "out:u64",
            f"""
        mov.u32 %r1, %tid.x; {body} mul.wide.u32 %d0, %r1, 4; add.u64 %d0, out, %d0; st.global.b32 [%d0], %r0;
        """,
        )
        text = re.sub(r"\.visible", ".global .u32 counter;\n.visible", text)
        out = torch.zeros(32, dtype=torch.int32)
        Program(text).launch(ONE, WARP, [out], **options)
        return (out - out.min()).tolist()

    assert order() == list(range(32))
    assert order(schedule="reverse") == list(range(31, -1, -1))
    random = order(schedule="random", seed=1)
    assert sorted(random) == list(range(32))
    assert random not in (order(), order(schedule="reverse"), order(schedule="random", seed=2))
    assert random == order(schedule="random", seed=1)
