"""The emulator's memory: bounds, spaces, loads and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulator.bodies import ONE, WARP, fails, run
from tests.emulator.samples import needs_gcc, ptx
from tests.ptx_on_cpu import Program

pytestmark = needs_gcc


# Memory


def test_each_access_is_checked_against_the_arguments() -> None:
    x = torch.arange(8, dtype=torch.int32)
    run("x:u64", "ld.global.b32 %r0, [x+28];", x)
    message = fails(
        "out-of-bounds global read of 4 bytes at byte 32 of argument 0, which has 32",
        "x:u64",
        "ld.global.b32 %r0, [x+32];",
        x,
    )
    assert "block (0, 0, 0), thread (0, 0, 0)" in message
    assert "ld.global.b32 %r0, [x+32];" in message
    fails("out-of-bounds global write of 4 bytes at byte -4", "x:u64", "st.global.b32 [x+-4], 0;", x)
    fails(
        "out-of-bounds global write of 16 bytes at byte 32",
        "x:u64",
        "st.global.v4.b32 [x+32], {%r0, %r0, %r0, %r0};",
        x,
    )
    fails("out-of-bounds global atomic", "x:u64", "red.global.add.u32 [x+64], 1;", x)
    fails("out-of-bounds global read", "x:u64", "ld.b32 %r0, [x+32];", x)
    fails("misaligned read of 4 bytes", "x:u64", "ld.global.b32 %r0, [x+2];", x)
    fails("misaligned write of 8 bytes", "x:u64", "st.global.v2.b32 [x+4], {%r0, %r0};", x)


def test_null_pointers() -> None:
    fails("read of 4 bytes through a null pointer", "x:u64", "ld.global.b32 %r0, [x];", None)


def test_a_view_allows_its_storage() -> None:
    x = torch.arange(8, dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    run("x:u64 out:u64", "ld.global.b32 %r0, [x+-8]; st.global.b32 [out], %r0;", x[2:5], out)
    assert out.item() == 0
    run("x:u64 out:u64", "ld.global.b32 %r0, [x+20]; st.global.b32 [out], %r0;", x[2:5], out)
    assert out.item() == 7


@pytest.mark.parametrize("store", ["st.global.b32 [x], 1;", "red.global.add.u32 [x], 1;", "st.b32 [x], 1;"])
def test_read_only_arguments(store: str) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    run("x:u64", store, x)
    assert x[0] == 1
    fails("to argument 0, which is read-only", "x:u64", store, x, read_only=[0])


def test_shared_memory_has_bounds() -> None:
    run("", "st.shared.b32 [memory+12], 1; ld.shared.b32 %r0, [memory+12];", shared=16)
    fails("out-of-bounds shared write of 4 bytes at byte 16 of 16", "", "st.shared.b32 [memory+16], 1;", shared=16)
    fails("out-of-bounds shared read of 4 bytes at byte -4", "", "ld.shared.b32 %r0, [memory+-4];", shared=16)
    fails("misaligned shared read of 8 bytes at byte 4", "", "ld.shared.b64 %d0, [memory+4];", shared=16)
    generic = "mov.u64 %d0, memory; cvta.shared.u64 %d0, %d0; "
    run("", generic + "st.b32 [%d0+12], 1;", shared=16)
    fails("out-of-bounds", "", generic + "st.b32 [%d0+16], 1;", shared=16)


def test_local_memory_has_bounds() -> None:
    depot = ".local .align 8 .b8 depot[16]; mov.u64 %d0, depot; cvta.local.u64 %d1, %d0; "
    out = torch.zeros(1, dtype=torch.int32)
    run("out:u64", depot + "st.local.b32 [%d0+12], 7; ld.b32 %r0, [%d1+12]; st.global.b32 [out], %r0;", out)
    assert out.item() == 7
    fails("out-of-bounds access of 4 bytes at 16 of 16", "", depot + "st.local.b32 [%d0+16], 7;")


def test_constants_and_variables_of_the_module() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    text = ptx(
        "out:u64", "ld.global.b32 %r0, [table+4]; ld.global.b32 %r1, [counter]; st.global.v2.b32 [out], {%r0, %r1};"
    )
    variables = ".global .align 4 .u32 table[3] = {7, 8, 9}; .global .u32 counter = 5;\n.visible"
    Program(text.replace(".visible", variables)).launch(ONE, ONE, [out])
    assert out.tolist() == [8, 5]


def test_functions_are_called_with_copies_of_their_arguments() -> None:
    function = """
    .func (.param .b32 result) twice_plus(.param .b32 x, .param .b64 y)
    {
    .reg .b32 %r<3>; .reg .b64 %d<2>;
    ld.param.b32 %r0, [x]; ld.param.b64 %d0, [y]; cvt.u32.u64 %r1, %d0;
    mad.lo.u32 %r2, %r0, 2, %r1;
    st.param.b32 [result], %r2;
    ret;
    }
    .visible"""
    body = """
    { .param .b32 p0; st.param.b32 [p0], 20; .param .b64 p1; st.param.b64 [p1], 2; .param .b32 r;
    call.uni (r), twice_plus, (p0, p1); ld.param.b32 %r0, [r]; }
    st.global.b32 [out], %r0;
    """
    out = torch.zeros(1, dtype=torch.int32)
    Program(ptx("out:u64", body).replace(".visible", function)).launch(ONE, ONE, [out])
    assert out.item() == 42


LOADS = ["ld", "ld.cg", "ld.volatile", "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.sys"]
LOADS += [f"ld.global{hint}" for hint in (".nc", ".nc.L1::no_allocate", ".L1::evict_last.L2::128B", ".ca", ".lu")]


@pytest.mark.parametrize("load", LOADS)
def test_hints_of_loads_change_nothing(load: str) -> None:
    x, out = torch.tensor([3, 4, 5, 6], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    body = f"{load}.v4.b32 {{%r0, %r1, %r2, %r3}}, [x]; st.global.cs.v4.b32 [out], {{%r0, %r1, %r2, %r3}};"
    run("x:u64 out:u64", body, x, out)
    assert torch.equal(out, x)


def test_loads_extend_by_the_sign_of_their_type() -> None:
    x, out = torch.tensor([-5], dtype=torch.int16), torch.zeros(4, dtype=torch.int32)
    body = """
    ld.global.s8 %r0, [x]; ld.global.u8 %r1, [x]; ld.global.s16 %r2, [x]; ld.global.u16 %r3, [x];
    st.global.v4.b32 [out], {%r0, %r1, %r2, %r3};
    """
    run("x:u64 out:u64", body, x, out)
    assert out.tolist() == [-5, 251, -5, 65531]


def _add_float(values: list[float]) -> float:
    total = torch.tensor(0.0)
    for value in values:
        total = total + value
    return float(total)


ATOMICS: dict[str, tuple[torch.dtype, Callable[[list[Any]], Any]]] = {
    "add.u32": (torch.int32, sum),
    "max.u32": (torch.int32, max),
    "min.s32": (torch.int32, lambda values: min(0, *values)),
    "or.b32": (torch.int32, lambda values: 31),
    "add.u64": (torch.int64, sum),
    "add.f32": (torch.float32, _add_float),
    "inc.u32": (torch.int32, lambda values: sum(1 for _ in values) % 32),
}


@pytest.mark.parametrize("operation", ATOMICS)
@pytest.mark.parametrize("opcode", ["red", "atom"])
def test_atomics_on_global_memory(opcode: str, operation: str) -> None:
    dtype, reference = ATOMICS[operation]
    kind = operation.split(".")[1]
    register = {"u64": "%d1", "f32": "%f1"}.get(kind, "%r1")
    values = torch.arange(32).to(dtype) if dtype != torch.float32 else torch.arange(32) / 3
    if operation == "inc.u32":
        values.fill_(31)
    out = torch.zeros(1, dtype=dtype)
    destination = f"{register.replace('1', '2')}, " if opcode == "atom" else ""
    body = f"""
    mov.u32 %r0, %tid.x; mul.wide.u32 %d0, %r0, {values.element_size()}; add.u64 %d0, x, %d0;
    ld.global.{kind.replace("s", "b")} {register}, [%d0];
    {opcode}.relaxed.gpu.global.{operation} {destination}[out], {register};
    """
    run("x:u64 out:u64", body, values, out, block=WARP)
    assert out.item() == reference(values.tolist())


def test_compare_and_swap_lets_other_threads_go_on() -> None:
    """A lock: every thread tries until it gets it."""
    out = torch.zeros(2, dtype=torch.int32)
    body = """
    AGAIN: atom.global.cas.b32 %r0, [out], 0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra AGAIN;
    ld.volatile.global.b32 %r1, [out+4]; add.u32 %r1, %r1, 1; st.volatile.global.b32 [out+4], %r1;
    atom.global.exch.b32 %r2, [out], 0;
    """
    run("out:u64", body, out, block=WARP, schedule="random")
    assert out.tolist() == [0, 32]
