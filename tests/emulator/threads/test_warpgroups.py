"""Warpgroups in the emulator: what wgmma demands of descriptors and registers, and setmaxnreg's pool.

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

ONE, GROUP = (1, 1, 1), (128, 1, 1)


@cache
def program(body: str, shared: int = 0, directives: str = "") -> Program:
    text = ptx("out:u64", body, shared=shared)
    return Program(text.replace(")\n{", f") {directives}\n{{", 1))


# Products of ones: whatever the swizzle, an element of the result is 32, the products that it sums up.

SHARED = 8192
ONES = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; shl.b32 %r2, %r0, 6; add.u32 %r2, %r2, %r1; mov.b32 %r3, 0x38383838;
st.shared.v4.b32 [%r2], {%r3, %r3, %r3, %r3}; st.shared.v4.b32 [%r2+16], {%r3, %r3, %r3, %r3};
st.shared.v4.b32 [%r2+32], {%r3, %r3, %r3, %r3}; st.shared.v4.b32 [%r2+48], {%r3, %r3, %r3, %r3};
fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %p0, %r0, %r0; setp.eq.u32 %p1, %r0, %r0;
"""
ADDRESS = "and.b32 %r4, %r1, 0x3ffff; shr.u32 %r4, %r4, 4; cvt.u64.u32 %d0, %r4;"
SWIZZLE_128 = 1 << 62 | 64 << 32  # groups of 8 rows are 1024 bytes apart
FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
)
DESCRIPTOR = f"{ADDRESS} or.b64 %d0, %d0, {SWIZZLE_128};"
STORE = """
mov.u32 %r5, %ctaid.x; mad.lo.u32 %r5, %r5, 128, %r0; mul.wide.u32 %d1, %r5, 4; add.u64 %d1, out, %d1;
st.global.f32 [%d1], %f0;
"""


def multiply(first: int = 0, accumulate: bool = False, n: int = 8) -> str:
    """A wgmma whose accumulators begin at %f<first>."""
    registers = ", ".join(f"%f{first + k}" for k in range(n // 2))
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{registers}}}, %d0, %d0, %p{int(accumulate)}, 1, 1;\n"
    )


def run(body: str, blocks: int = 1, **options: Any) -> list[float]:
    """The distinct values that threads have in %f0 at the end."""
    out = torch.zeros(128 * blocks)
    launch = program(ONES + body + STORE, SHARED).launch
    launch((blocks, 1, 1), GROUP, [out], cluster=(blocks, 1, 1), **options)
    return out.unique().tolist()


def fails(message: str, body: str, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(body, **options)


# Matrix Descriptor Format


def product(descriptor: str) -> str:
    return f"{descriptor} {FENCE} {multiply()} {COMMIT} {WAIT}"


def test_a_descriptor_takes_18_bits_of_an_address() -> None:
    """Of a cluster's second block, an address has bit 24 set: bit 20 of a descriptor that does not mask it."""
    masked, whole = product(DESCRIPTOR), product(DESCRIPTOR.replace("0x3ffff", "0xffffffff"))
    assert run(masked) == run(masked, blocks=2) == run(whole) == [32.0]
    fails(r"leading dimension offset of 16, not 0 or 1.* \[block \(1, 0, 0\)", whole, blocks=2)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 48, 52, 61])
def test_reserved_bits_of_a_descriptor_are_zero(bit: int) -> None:
    fails(f"reserved bits set, {1 << bit:#x}:", product(f"{DESCRIPTOR} or.b64 %d0, %d0, {1 << bit};"))


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (SWIZZLE_128 | 1 << 16, ""),
        (SWIZZLE_128 | 2 << 16, "leading dimension offset of 2"),
        (SWIZZLE_128 | 1 << 49, "limit of the emulator: a matrix descriptor with a base offset"),
        (8 << 16 | 16 << 32, ""),
        (8 << 16 | 16 << 32 | 1 << 49, "a base offset, but no swizzle"),
    ],
)
def test_fields_that_have_no_meaning(bits: int, message: str) -> None:
    """With a swizzle no leading dimension of a K-major operand, without one no base offset."""
    body = product(f"{ADDRESS} or.b64 %d0, %d0, {bits};")
    if message:
        fails(message, body)
    else:
        assert run(body) == [32.0]


# wgmma.mma_async, wgmma.wait_group: registers of one in flight

START = f"{DESCRIPTOR} {FENCE}"
FLIGHTS = {
    "one": (f"{multiply()} {COMMIT} {WAIT}", 32.0),
    "accumulated in the same registers without a wait": (f"{multiply()} {multiply(0, True)} {COMMIT} {WAIT}", 64.0),
    "over two groups": (f"{multiply()} {COMMIT} {multiply(0, True)} {COMMIT} {WAIT}", 64.0),
    "begun anew": (f"{multiply()} {COMMIT} {multiply()} {COMMIT} {WAIT}", 32.0),
    "the older of two groups": (
        f"{multiply()} {COMMIT} {multiply(4)} {COMMIT} wgmma.wait_group.sync.aligned 1; add.f32 %f0, %f0, %f0; {WAIT}",
        64.0,
    ),
    "copied by the compiler": (f"{multiply()} {COMMIT} mov.f32 %f8, %f0; {WAIT} add.f32 %f0, %f8, %f8;", 64.0),
    "copied on to the next": (
        f"{multiply()} mov.f32 %f4, %f0; mov.f32 %f5, %f1; mov.f32 %f6, %f2; mov.f32 %f7, %f3; {multiply(4, True)}"
        f"{COMMIT} {WAIT} mov.f32 %f0, %f4;",
        64.0,
    ),
    "added to what was read": (
        f"{multiply()} {COMMIT} {WAIT} add.f32 %f0, %f0, %f0; {FENCE} {multiply(0, True)} {COMMIT} {WAIT}",
        96.0,
    ),
}


@pytest.mark.parametrize("flight", FLIGHTS)
def test_accumulators_after_their_wait(flight: str) -> None:
    body, expected = FLIGHTS[flight]
    assert run(START + body) == [expected]


READ = "is read before wgmma.wait_group"
EARLY = {
    "computed with": (f"{multiply()} {COMMIT} add.f32 %f4, %f0, %f0; {WAIT}", READ),
    "stored": (f"{multiply()} {COMMIT} st.global.f32 [out], %f3; {WAIT}", READ),
    "packed": (f"{multiply()} {COMMIT} mov.b64 %d9, {{%f0, %f1}}; {WAIT}", READ),
    "before the commit": (f"{multiply()} add.f32 %f4, %f1, %f1; {COMMIT} {WAIT}", READ),
    "a copy of it": (f"{multiply()} {COMMIT} mov.f32 %f8, %f0; add.f32 %f8, %f8, %f8; {WAIT}", READ),
    "the younger of two groups": (
        f"{multiply()} {COMMIT} {multiply(4)} {COMMIT} wgmma.wait_group.sync.aligned 1; add.f32 %f0, %f4, %f0; {WAIT}",
        READ,
    ),
    "not committed": (f"{multiply()} {WAIT}", READ),
    "not waited for": (f"{multiply()} {COMMIT}", READ),
    "left behind": (f"{multiply(4)} {COMMIT}", "exits while a wgmma is in flight"),
    "overwritten": (f"{multiply()} {COMMIT} mov.f32 %f1, 0f00000000; {WAIT}", "was overwritten before"),
    "overwritten, then multiplied": (
        f"{multiply()} {COMMIT} mov.f32 %f1, 0f00000000; {multiply(0, True)} {COMMIT} {WAIT}",
        "was overwritten before",
    ),
    "used by another shape": (f"{multiply()} {multiply(0, True, 16)} {COMMIT} {WAIT}", "has another shape"),
}


@pytest.mark.parametrize("flight", EARLY)
def test_accumulators_in_flight_are_left_alone(flight: str) -> None:
    body, message = EARLY[flight]
    fails(message, START + body)


def test_what_was_waited_for_may_be_overwritten() -> None:
    assert run(f"{START} {multiply()} {COMMIT} {WAIT} mov.f32 %f0, 0f40000000;") == [2.0]


# wgmma.fence: before the first wgmma, and when registers were accessed in between


def test_a_fence_orders_registers_before_each_wgmma() -> None:
    fails("without wgmma.fence", f"{DESCRIPTOR} {multiply()} {COMMIT} {WAIT}")
    twice = FLIGHTS["added to what was read"][0]
    fails("without wgmma.fence", START + twice.replace(FENCE, ""))


# setmaxnreg: 384 threads begin with 168 registers each, as ptxas leaves them


def registers_of_groups(*bodies: str, registers: int | None = None, directives: str = ".maxntid 384, 1, 1") -> None:
    """Each warpgroup runs one of `bodies`."""
    lines = ["mov.u32 %r0, %tid.x; shr.u32 %r0, %r0, 7;"]
    for k, body in enumerate(bodies):
        lines.append(f"setp.ne.u32 %p0, %r0, {k}; @%p0 bra NEXT{k};\n{body}\nNEXT{k}:")
    launch = program("\n".join(lines), 16, directives).launch
    launch(ONE, (128 * len(bodies), 1, 1), [torch.zeros(1)], registers=registers)


def dec(count: int) -> str:
    return f"setmaxnreg.dec.sync.aligned.u32 {count};"


def inc(count: int) -> str:
    return f"setmaxnreg.inc.sync.aligned.u32 {count};"


def test_what_one_warpgroup_returns_others_take() -> None:
    registers_of_groups(inc(224), inc(224), dec(56))
    registers_of_groups(f"{dec(56)} bar.sync 1, 128; {inc(168)}", "", "")
    halves = "mov.u32 %r1, %warpid; setp.ge.u32 %p1, %r1, 2; @%p1 bra UPPER;"
    registers_of_groups(f"{halves} {dec(56)} bra OUT;\nUPPER: {dec(56)} OUT:", inc(224), inc(224))


POOLS = {
    "too much for one": ((inc(232), dec(56), inc(224)), r"deadlock .*registers in the block's pool \(setmaxnreg\)"),
    "nobody returns any": ((inc(224), "", ""), "deadlock .*pool"),
    "too few are returned": ((inc(224), inc(224), dec(64)), "deadlock .*pool"),
    "up by dec": ((dec(176), "", ""), "setmaxnreg.dec to 176 registers: the warp has 168"),
    "down by inc": ((inc(160), inc(224), dec(24)), "setmaxnreg.inc to 160 registers: the warp has 168"),
    "a warp on its own": (
        (f"mov.u32 %r1, %warpid; setp.ne.u32 %p1, %r1, 2; @%p1 bra OUT; {dec(56)} OUT:", "", ""),
        "warps 0 and 2 of a warpgroup did not execute the same setmaxnreg",
    ),
}


@pytest.mark.parametrize("pool", POOLS)
def test_the_pool_of_registers(pool: str) -> None:
    bodies, message = POOLS[pool]
    with pytest.raises(EmulatorError, match=message):
        registers_of_groups(*bodies, directives=".maxntid 384, 1, 1 .minnctapersm 1")


def test_registers_at_entry() -> None:
    """Given; or those of .maxnreg; or what .maxntid and .minnctapersm leave; or unknown, and nothing happens."""
    with pytest.raises(EmulatorError, match="the warp has 208"):
        registers_of_groups(inc(200), dec(24), registers=208)
    with pytest.raises(EmulatorError, match="the warp has 96"):
        registers_of_groups(dec(104), directives=".maxnreg 96")
    with pytest.raises(EmulatorError, match="the warp has 80"):
        registers_of_groups(dec(88), "", "", directives=".maxntid 384, 1, 1 .minnctapersm 2")
    registers_of_groups(inc(240), "", "", directives="")


@pytest.mark.parametrize("count", [16, 28, 264])
def test_counts_that_ptxas_refuses(count: int) -> None:
    with pytest.raises(EmulatorError, match=f"setmaxnreg to {count} registers: a multiple of 8 from 24 to 256"):
        registers_of_groups(dec(count))
