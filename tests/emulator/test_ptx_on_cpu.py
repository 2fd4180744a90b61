"""The emulator of PTX: its interface, and what it says where it gives up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import cuda
from numba.cuda import types

from tests.emulator.bodies import ONE, WARP, fails, run, words
from tests.emulator.samples import TARGETS, compiled, needs_gcc, ptx
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap, build
from tests.ptx_on_cpu.mutants import run_as, with_mutants
from tests.tiers import thorough

pytestmark = needs_gcc


# Launches


def test_parameters_are_packed_by_their_types() -> None:
    out = torch.zeros(6, dtype=torch.int64)
    body = """
    cvta.to.global.u64 %d0, out;
    st.global.u64 [%d0], a; st.global.u32 [%d0+8], b; st.global.f32 [%d0+16], c; st.global.f64 [%d0+24], d;
    cvt.s64.s16 %d1, e; st.global.b64 [%d0+32], %d1; st.global.b32 [%d0+40], f;
    """
    run("out:u64 a:s64 b:u32 c:f32 d:f64 e:b16 f:b32", body, out, -5, 2**32 - 7, 1.5, 3, 2**16 - 1, 2.5)
    assert out[0] == -5
    assert out[1] == 2**32 - 7
    assert out[2:3].view(torch.float32)[0] == 1.5
    assert out[3:4].view(torch.float64)[0] == 3.0
    assert out[4] == -1
    assert out[5:6].view(torch.float32)[0] == 2.5


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_every_thread_of_every_block_runs_once(cluster: tuple[int, int, int]) -> None:
    grid, block = (4, 2, 6), (5, 3, 2)
    out = torch.zeros(grid[2], grid[1], grid[0], block[2], block[1], block[0], dtype=torch.int32)
    body = """
    mov.u32 %r0, %ctaid.z;
    mov.u32 %r1, %nctaid.y; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r0, %r0, %r1, %r2;
    mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r0, %r0, %r1, %r2;
    mov.u32 %r1, %ntid.z; mov.u32 %r2, %tid.z; mad.lo.u32 %r0, %r0, %r1, %r2;
    mov.u32 %r1, %ntid.y; mov.u32 %r2, %tid.y; mad.lo.u32 %r0, %r0, %r1, %r2;
    mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2;
    mul.wide.u32 %d0, %r0, 4; add.u64 %d0, out, %d0;
    red.global.add.u32 [%d0], 1;
    """
    Program(ptx("out:u64", body)).launch(grid, block, [out], cluster=cluster)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1025, 1, 1)}, "1025 threads"),
        ({"grid": (0, 1, 1)}, "three positive numbers"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "divisor of grid"),
        ({"grid": (17, 1, 1), "cluster": (17, 1, 1)}, "at most 16 blocks"),
        ({"dynamic_shared": 227 * 1024 + 1}, "bytes of shared memory"),
        ({"args": []}, "takes 1 arguments, not 0"),
        ({"args": [2**64]}, "does not fit 64 bits"),
        ({"args": [1.5]}, "is not of this type"),
        ({"args": [TensorMap(torch.zeros(16), (4,))]}, "passed by value"),
    ],
)
def test_launches_that_a_driver_would_refuse(options: dict[str, Any], message: str) -> None:
    launch = {"grid": ONE, "block": ONE, "args": [0]} | options
    with pytest.raises(EmulatorError, match=message):
        Program(ptx("a:u64", "")).launch(**launch)


def test_limits_in_the_ptx_hold() -> None:
    text = ptx("", "").replace("kernel()", "kernel() .maxntid 64, 1, 1 .reqnctapercluster 2, 1, 1")
    program = Program(text)
    program.launch((2, 1, 1), (64, 1, 1), [], cluster=(2, 1, 1))
    with pytest.raises(EmulatorError, match="65 threads: the kernel is for 64"):
        program.launch((2, 1, 1), (65, 1, 1), [], cluster=(2, 1, 1))
    with pytest.raises(EmulatorError, match="the kernel is for \\(2, 1, 1\\)"):
        program.launch((2, 1, 1), (64, 1, 1), [])


def test_selections() -> None:
    body = """
    mov.b32 %r8, -3; mov.f32 %f0, 0fBF800000;
    slct.b32.s32 %r0, 1, 2, %r8; slct.b32.f32 %r1, 1, 2, %f0; slct.b32.s32 %r2, 1, 2, 0;
    set.lt.u32.s32 %r3, %r8, 0; set.gt.f32.s32 %f1, %r8, 0; mov.b32 %r4, %f1;
    cnot.b32 %r5, %r8; cnot.b32 %r6, %r4;
    """
    assert words(body, 7) == [2, 2, 1, -1, 0, 0, 1]


def test_properties_of_floats() -> None:
    infinity, nan, subnormal = "0f7F800000", "0f7FC00000", "0f00000001"
    for name, expected in (
        ("finite", [0, 0, 1]),
        ("infinite", [1, 0, 0]),
        ("notanumber", [0, 1, 0]),
        ("number", [1, 0, 1]),
        ("normal", [0, 0, 0]),
        ("subnormal", [0, 0, 1]),
    ):
        tests = (
            f"testp.{name}.f32 %p0, {x}; selp.b32 %r{k}, 1, 0, %p0;" for k, x in enumerate((infinity, nan, subnormal))
        )
        assert words(" ".join(tests), 3) == expected, name
    assert words("copysign.f32 %f0, 0f80000000, 0f3F800000; mov.b32 %r0, %f0;", 1) == [-(2**31) + 0x3F800000]


def test_generic_addresses_know_their_space() -> None:
    body = """
    mov.u64 %d0, memory; cvta.shared.u64 %d1, %d0; cvta.to.shared.u64 %d2, %d1;
    isspacep.shared %p0, %d1; selp.b32 %r0, 1, 0, %p0; isspacep.global %p0, %d1; selp.b32 %r1, 1, 0, %p0;
    isspacep.shared %p0, out; selp.b32 %r2, 1, 0, %p0; isspacep.global %p0, out; selp.b32 %r3, 1, 0, %p0;
    mapa.u64 %d3, %d1, 0; st.b32 [%d3], 9; ld.shared.b32 %r4, [memory];
    sub.u64 %d4, %d2, %d0; cvt.u32.u64 %r5, %d4;
    """
    assert words(body, 6, shared=16) == [1, 0, 0, 1, 9, 0]
    fails("not in shared memory", "x:u64", "cvta.to.shared.u64 %d0, x;", torch.zeros(1))
    fails("block 1 of a cluster of 1", "", "mov.u32 %r0, memory; mapa.shared::cluster.u32 %r1, %r0, 1;", shared=16)


def test_hints_have_no_effect() -> None:
    body = """
    prefetch.global.L2 [out]; griddepcontrol.launch_dependents; griddepcontrol.wait; nanosleep.u32 100;
    createpolicy.fractional.L2::evict_first.b64 %d0, 0f3F800000;
    mov.u32 %r1, 5; st.global.L2::cache_hint.b32 [out], %r1, %d0; ld.global.L2::cache_hint.b32 %r0, [out], %d0;
    """
    assert words(body, 1) == [5]


def test_special_registers() -> None:
    body = """
    mov.u32 %r0, %laneid; mov.u32 %r1, %warpid; mov.u32 %r2, %lanemask_lt; mov.u32 %r3, %lanemask_ge;
    mov.u32 %r4, WARP_SZ; mov.u32 %r5, %dynamic_smem_size; mov.u32 %r6, %cluster_nctarank;
    mov.u32 %r7, %tid.x; setp.ne.u32 %p0, %r7, 37; @%p0 exit;
    """
    expected = [5, 1, 31, -32, 32, 64, 1]
    assert words(body, 7, block=(64, 1, 1), dynamic_shared=64) == expected


# What is not supported


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.fence::before_thread_sync;",
        "add.rz.f32 %f0, %f1, %f2;",
        "add.cc.u32 %r0, %r1, %r2;",
        "cvt.rna.tf32.f32 %r0, %f0;",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r0,%r1}, {%r2}, {%r3}, {%r0,%r1};",
        "ld.acquire.cta.shared.b32 %r0, [memory];",
        "cp.async.ca.shared.global [memory], [%d0], 12;",
        "mov.u32 %r0, %clock;",
        "call.uni vprintf, (%r0);",
        "bra NOWHERE;",
        "add.u32 %r0, %undeclared, 1;",
        "activemask.b32 %r0;",
        "prmt.b32.f4e %r0, %r1, %r2, %r3;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0,%f1,%f2,%f3}, %d0, %d1, %p0, 1, 1, 0, 1;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u32 [%d0], [memory], 16;",
    ],
)
def test_what_is_not_supported_is_named_with_its_line(text: str) -> None:
    module = ptx("", f"mov.u32 %r0, 1;\n{text}", shared=16)
    line = next(k for k, x in enumerate(module.splitlines(), 1) if x == text)
    with pytest.raises(EmulatorError, match=re.escape(f"PTX line {line}: not supported")) as error:
        Program(module)
    assert text.rstrip(";") in str(error.value)


def test_text_that_is_no_ptx() -> None:
    with pytest.raises(EmulatorError, match="PTX line 2: unsupported directive: hello"):
        Program("\nhello")
    with pytest.raises(EmulatorError, match="0 entries"):
        Program(".version 9.0\n.target sm_90a\n")
    with pytest.raises(EmulatorError, match="2 entries"):
        Program(ptx("", "") + ptx("", "").replace("kernel", "other").partition(".address_size 64")[2])
    with pytest.raises(EmulatorError, match="without an end"):
        Program(ptx("", "").rstrip().rstrip("}"))


def test_traps_are_reported() -> None:
    fails("trap", "", "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 3; @%p0 trap;", block=WARP)


# Compilation


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_numba_name_the_line_of_their_source(target: str) -> None:
    def kernel(x: Any, n: Any) -> None:
        i = cuda.grid(1)
        x[i + n] = x[i]

    text = compiled(kernel, types.void(types.CPointer(types.float32), types.int32), 32, target, lineinfo=True)
    program = Program(text)
    x = torch.arange(64.0)
    program.launch(ONE, WARP, [x, 32])
    assert torch.equal(x[32:], x[:32])
    with pytest.raises(EmulatorError, match="out-of-bounds global write") as error:
        program.launch(ONE, WARP, [x, 33])
    line = kernel.__code__.co_firstlineno + 2
    assert f"{Path(__file__).name}:{line}" in str(error.value)
    assert "thread (31, 0, 0)" in str(error.value)


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setenv("PTX_ON_CPU_CACHE", str(tmp_path))
    text = ptx("x:u64", "st.global.b32 [x], 41;")
    Program(text)
    compiled_files = set(tmp_path.iterdir())
    assert len(compiled_files) == 1
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("gcc was called"))
    Program(text).launch(ONE, ONE, [x])
    assert x.item() == 41
    assert set(tmp_path.iterdir()) == compiled_files


def test_mutants_lack_what_they_say() -> None:
    """Single statements, one with its guard, a scope, a part of that, and several at once."""
    one, guarded, inner = "add.u32 %r0, %r0, 1;", "add.u32 %r0, %r0, 2;", "add.u32 %r0, %r0, 4;"
    scope = f"{{ .reg .b32 x; mov.u32 x, 8; {inner} add.u32 %r0, %r0, x; }}"
    body = f"mov.u32 %r0, 0; setp.ne.u32 %p0, %r0, 0; {one} @!%p0 {guarded} {scope} add.u32 %r0, %r0, 16; "
    text = ptx("out:u64", f"{body} st.global.u32 [out], %r0;")
    spans = {part: (text.index(part), text.index(part) + len(part)) for part in (one, guarded, inner, scope)}
    lacking = [[one], [guarded], [inner], [scope], [one, inner, guarded]]
    program = Program(with_mutants(text, [[spans[part] for part in parts] for parts in lacking]))
    out = torch.zeros(1, dtype=torch.int32)
    for mutant, right in enumerate((31, 30, 29, 27, 19, 24)):
        run_as(program, mutant)
        program.launch(ONE, ONE, [out])
        assert out.item() == right


@thorough
def test_processes_share_a_cache(tmp_path: Path) -> None:
    """Two processes that compile the same at the same time both get a whole file."""
    shutil.copy(build.runtime()._name, tmp_path)
    script = "import sys\nfrom tests.ptx_on_cpu import Program\nProgram(sys.argv[1]).launch((1, 1, 1), (1, 1, 1), [])\n"
    environment = os.environ | {"PTX_ON_CPU_CACHE": str(tmp_path)}
    command, folder = [sys.executable, "-c", script, ptx("", "mov.u32 %r0, 1;")], Path(__file__).parents[2]
    processes = [subprocess.Popen(command, env=environment, cwd=folder) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".so", ".so"]  # the runtime and the kernel
