"""Threads of a block in the emulator: warps, barriers, the races that they prevent, and schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulator.samples import needs_gcc, ptx
from tests.emulator.threads.bodies import ALL, ONE, WARP, fails, per_thread, schedules
from tests.ptx_on_cpu import Program

pytestmark = needs_gcc


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
