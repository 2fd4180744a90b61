"""Blocks in the emulator: the order in which they run, and what they may not rely on of each other."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.samples import needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap
from tests.tiers import thorough

pytestmark = needs_gcc

ONE = (1, 1, 1)
schedules = pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
modes = pytest.mark.parametrize("copies", ["eager", "late", "random"])


@cache
def program(parameters: str, body: str, shared: int = 0) -> Program:
    return Program(ptx(parameters, body, shared=shared))


def launch(parameters: str, body: str, *args: Any, grid: tuple[int, int, int], shared: int = 0, **options: Any) -> None:
    program(parameters, body, shared).launch(grid, ONE, list(args), **options)


# The order of blocks

TICKET = """
mov.u32 %r0, %ctaid.z; mov.u32 %r1, %nctaid.y; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r0, %r0, %r1, %r2;
mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r0, %r0, %r1, %r2;
mul.wide.u32 %d0, %r0, 4; add.u64 %d0, out, %d0;
atom.global.add.u32 %r3, [counter], 1; st.global.b32 [%d0], %r3;
"""


def order(grid: tuple[int, int, int] = (4, 3, 2), **options: Any) -> list[int]:
    """When each block ran."""
    out, counter = torch.zeros(24, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch("out:u64 counter:u64", TICKET, out, counter, grid=grid, **options)
    return out.tolist()


def test_blocks_run_up_down_and_in_any_order() -> None:
    up = list(range(24))
    assert order() == up
    assert order(schedule="reverse") == up[::-1]
    random = order(schedule="random", seed=1)
    assert sorted(random) == up
    assert random not in (up, up[::-1], order(schedule="random", seed=2))
    assert random == order(schedule="random", seed=1)


@schedules
def test_blocks_of_a_cluster_run_together(schedule: Any) -> None:
    times = torch.tensor(order(cluster=(2, 1, 2), schedule=schedule)).view(2, 3, 4)
    together = times.view(2, 3, 2, 2).permute(1, 2, 0, 3).reshape(6, 4) // 4
    assert (together == together[:, :1]).all()
    assert sorted(together[:, 0].tolist()) == list(range(6))


def test_a_block_that_writes_to_its_neighbour_is_not_repaired() -> None:
    """Each block writes two words, its own and the next block's: going up, the neighbour puts that right."""
    body = """
    mov.u32 %r0, %ctaid.x; mul.wide.u32 %d0, %r0, 4; add.u64 %d0, out, %d0; st.global.b32 [%d0], %r0;
    st.global.b32 [%d0+4], %r0;
    """
    for schedule, right in (("forward", True), ("reverse", False)):
        out = torch.zeros(9, dtype=torch.int32)
        launch("out:u64", body, out, grid=(8, 1, 1), schedule=schedule, races=False)
        assert (out[:8].tolist() == list(range(8))) == right


# Races on global memory: "Memory Consistency Model", data races

WRITES_READS = """
mov.u32 %r0, %ctaid.x; setp.eq.u32 %p0, %r0, 0;
@%p0 {write};
{between}
@!%p0 {read};
@!%p0 st.global.b32 [out], %r1;
"""
RACES = {
    "a read": ("st.global.b32 [x], 5", "ld.global.b32 %r1, [x]", "race: global memory .* is read, which block 0 wrote"),
    "a write": ("st.global.b32 [x], 5", "st.global.b32 [x], 6", "race: .* is written, which block . wrote"),
    "of one byte": ("st.global.b32 [x], 5", "st.global.b8 [x+3], 6", "race: .* is written, which block . wrote"),
    "by generic addresses": ("st.b32 [x], 5", "ld.b32 %r1, [x]", "race: global memory"),
    "a relaxed read": ("st.global.b32 [x], 5", "ld.relaxed.gpu.global.b32 %r1, [x]", "race: global memory"),
    "an atomic": ("st.global.b32 [x], 5", "red.global.add.u32 [x], 1", "race: .* is written, which block . wrote"),
    "an atomic and a read": ("red.global.add.u32 [x], 1", "ld.global.b32 %r1, [x]", "race: .* is "),
}
NO_RACES = {
    "two reads": ("ld.global.b32 %r1, [x]", "ld.global.b32 %r1, [x]"),
    "neighbours": ("st.global.b16 [x], 5", "st.global.b16 [x+2], 6"),
    "two atomics": ("red.global.add.u32 [x], 1", "red.global.add.u32 [x], 1"),
    "an atomic and a relaxed read": ("red.global.max.u32 [x], 1", "ld.relaxed.gpu.global.b32 %r1, [x]"),
    "two volatile accesses": ("st.volatile.global.b32 [x], 5", "ld.volatile.global.b32 %r1, [x]"),
}


def two_blocks(write: str, read: str, between: str = "", **options: Any) -> None:
    x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = WRITES_READS.format(write=write, read=read, between=between)
    launch("x:u64 out:u64", body, x, out, grid=(2, 1, 1), **options)


@pytest.mark.parametrize("race", RACES)
@schedules
def test_blocks_race_on_global_memory(race: str, schedule: Any) -> None:
    write, read, message = RACES[race]
    with pytest.raises(EmulatorError, match=message if schedule == "forward" else "race: global memory"):
        two_blocks(write, read, schedule=schedule)
    two_blocks(write, read, schedule=schedule, races=False)
    two_blocks(write, read, schedule=schedule, cluster=(2, 1, 1))


@pytest.mark.parametrize("accesses", NO_RACES)
@schedules
def test_what_blocks_may_do_at_the_same_time(accesses: str, schedule: Any) -> None:
    two_blocks(*NO_RACES[accesses], schedule=schedule)


FLAG = "WAIT: {} setp.eq.u32 %p1, %r2, 0; @%p1 bra WAIT;"
FLAGS = {
    "release and acquire": ("st.release.gpu.global.b32 [x+4], 1", "ld.acquire.gpu.global.b32 %r2, [x+4];"),
    "atomics": ("atom.release.gpu.global.exch.b32 %r3, [x+4], 1", "atom.acquire.gpu.global.add.u32 %r2, [x+4], 0;"),
    "fences": (
        "fence.acq_rel.gpu; @%p0 st.relaxed.gpu.global.b32 [x+4], 1",
        "ld.relaxed.gpu.global.b32 %r2, [x+4]; fence.acq_rel.gpu;",
    ),
    "membar": ("membar.gl; @%p0 st.volatile.global.b32 [x+4], 1", "ld.volatile.global.b32 %r2, [x+4]; membar.gl;"),
}


def passed_through_a_flag(signal: str, wait: str, **options: Any) -> int:
    """Block 0 writes and signals, block 1 waits and reads."""
    x, out = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    write, between = f"st.global.b32 [x], 5; @%p0 {signal}", f"@%p0 bra END; {FLAG.format(wait)}"
    body = WRITES_READS.format(write=write, read="ld.global.b32 %r1, [x]", between=between) + "END:"
    launch("x:u64 out:u64", body, x, out, grid=(2, 1, 1), **options)
    return int(out)


@pytest.mark.parametrize("flag", FLAGS)
def test_blocks_are_ordered_by_what_they_release_and_acquire(flag: str) -> None:
    signal, wait = FLAGS[flag]
    assert passed_through_a_flag(signal, wait) == 5
    assert passed_through_a_flag(signal, wait, cluster=(2, 1, 1), schedule="reverse") == 5
    for narrower in ((signal.replace("release", "relaxed"), wait), (signal, wait.replace("acquire", "relaxed"))):
        if narrower != (signal, wait):
            with pytest.raises(EmulatorError, match="race: global memory"):
                passed_through_a_flag(*narrower)
    if "fence" in signal:
        with pytest.raises(EmulatorError, match="race: global memory"):
            passed_through_a_flag(signal.replace("acq_rel.gpu", "acq_rel.cta"), wait)


@pytest.mark.parametrize("flag", ["release and acquire", "fences", "membar"])
def test_a_block_that_waits_for_one_that_has_not_begun_is_a_deadlock(flag: str) -> None:
    """Nothing says that blocks of a grid run at the same time: what waits for a later one may wait forever."""
    with pytest.raises(EmulatorError, match=r"deadlock \[block \(1, 0, 0\)\]: .* blocks run one after another"):
        passed_through_a_flag(*FLAGS[flag], schedule="reverse")


# ld.global.nc: only what the kernel does not write


def test_what_a_launch_writes_is_not_read_as_constant() -> None:
    for load in ("ld.global.nc.b32", "ld.global.nc.L1::no_allocate.b32"):
        body = f"{load} %r0, [x+4]; st.global.b32 [x], %r0; {load} %r0, [x+4]; {{}}"
        x = torch.zeros(2, dtype=torch.int32)
        launch("x:u64", body.format(""), x, grid=ONE)
        with pytest.raises(EmulatorError, match="ld.global.nc at .* of what the same launch wrote at PTX line"):
            launch("x:u64", body.format(f"{load} %r1, [x];"), x, grid=ONE)


# Bulk and tensor stores of one block, and what another may see of them

FILL = """
mov.u32 %r0, %ctaid.x; mov.u32 %r1, memory; setp.ne.u32 %p0, %r0, 0; @%p0 bra OTHER;
mov.b32 %r2, 0x40E00000; st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2}; fence.proxy.async.shared::cta;
mov.u64 %d0, param_map; cvta.param.u64 %d0, %d0;
"""
REST = """
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
bra END;
OTHER: ld.volatile.global.b32 %r3, [x]; st.global.b32 [out], %r3;
END:
"""
STORES = {
    "bytes": "cp.async.bulk.global.shared::cta.bulk_group [x], [%r1], 16;",
    "tensor": "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%d0, {0}], [%r1];",
    "add": "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%d0, {0}], [%r1];",
}


def stored_and_read(store: str, wait: str, **options: Any) -> tuple[float, float]:
    """What another block reads of a store of 7, and what is there in the end."""
    x, out = torch.zeros(4), torch.zeros(1)
    text = ptx("x:u64 out:u64", FILL + STORES[store] + REST.replace(".read", wait), shared=128)
    text = text.replace("kernel(", "kernel(.param .align 64 .b8 param_map[128], ")
    Program(text).launch((2, 1, 1), ONE, [TensorMap(x, (4,)), x, out], **options)
    return float(out), float(x[0])


@pytest.mark.parametrize("store", STORES)
def test_stores_that_nobody_waits_for_arrive_when_all_blocks_have_ended(store: str) -> None:
    """cp.async.bulk.wait_group: with .read only the shared memory is known to be read."""
    for schedule, copies, wait, seen in (
        ("forward", "eager", ".read", 7.0),
        ("forward", "late", "", 7.0),
        ("forward", "late", ".read", 0.0),
        ("reverse", "eager", "", 0.0),
    ):
        options = {"schedule": schedule, "copies": copies, "races": False}
        assert stored_and_read(store, wait, **options) == (seen, 7.0)


@pytest.mark.parametrize("wait", ["", ".read"])
@pytest.mark.parametrize("store", [store for store in STORES if store != "add"])
@modes
@schedules
def test_stores_race_with_other_blocks(store: str, wait: str, copies: Any, schedule: Any) -> None:
    with pytest.raises(EmulatorError, match="race: global memory at"):
        stored_and_read(store, wait, copies=copies, schedule=schedule)


# Loops without an end


@pytest.mark.parametrize(
    "poll", [pytest.param("ld.global.b32 %r0, [x];", marks=thorough), "atom.global.add.u32 %r0, [x], 0;"]
)
def test_a_poll_that_nothing_ends_is_reported(poll: str) -> None:
    body = f"WAIT: {poll} setp.eq.u32 %p0, %r0, 0; @%p0 bra WAIT;"
    with pytest.raises(EmulatorError, match="deadlock .* a value in memory|loops of more than .* does not end"):
        launch("x:u64", body, torch.zeros(1, dtype=torch.int32), grid=(2, 1, 1), races=False)
