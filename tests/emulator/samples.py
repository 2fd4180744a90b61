"""Kernels for the tests of the emulator: PTX by hand, and Numba's, compiled as the project compiles its own."""

from __future__ import annotations

from typing import Any

from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda
from numba.cuda import types

from tests.emulator.gcc import needs_gcc as needs_gcc

f32, i32, i64, u32, void = types.float32, types.int32, types.int64, types.uint32, types.void
TARGETS = {"sm_89": (8, 9), "sm_90a": (9, 0, "a"), "sm_120": (12, 0)}

# PTX by hand


def ptx(parameters: str, body: str, target: str = "sm_90a", shared: int = 0) -> str:
    """A module whose kernel has these `parameters` ("x:u64 n:u32", loaded into registers of those names) and `body`.

    Predicates %p0..., registers %h0... (16 bits), %r0... (32), %d0... (64), %f0... (float32) and %e0... (float64) are
    declared, and `shared` bytes of shared memory named memory.
    """
    pairs = [p.split(":") for p in parameters.split()]
    declared = ", ".join(f".param .{kind} param_{name}" for name, kind in pairs)
    loads = "\n".join(f".reg .{kind} {name}; ld.param.{kind} {name}, [param_{name}];" for name, kind in pairs)
    memory = f".shared .align 1024 .b8 memory[{shared}];" if shared else ""
    return f"""
.version 9.0
.target {target}
.address_size 64
{memory}
.visible .entry kernel({declared})
{{
.reg .pred %p<16>; .reg .b16 %h<64>; .reg .b32 %r<64>; .reg .b64 %d<64>; .reg .f32 %f<64>; .reg .f64 %e<64>;
{loads}
{body}
ret;
}}
"""


_MEMORY = {"e": ("f64", 8), "f": ("f32", 4), "d": ("b64", 8), "r": ("b32", 4), "h": ("b16", 2)}


def elementwise(sources: str, targets: str, body: str) -> str:
    """A kernel of one thread for each element: `body` computes the registers `targets` from the registers `sources`,
    loaded from arrays of the registers' types. Parameters: the arrays of both, and the number of elements."""
    names = [*sources.split(), *targets.split()]
    lines = [
        "mov.u32 %r60, %ctaid.x; mov.u32 %r61, %ntid.x; mov.u32 %r62, %tid.x; mad.lo.u32 %r63, %r60, %r61, %r62;",
        "setp.ge.u32 %p15, %r63, n; @%p15 bra FINISH;",
    ]
    for k, name in enumerate(names):
        kind, size = _MEMORY[name[1]]
        lines.append(f"mul.wide.u32 %d63, %r63, {size}; add.u64 a{k}, a{k}, %d63;")
        if k < len(sources.split()):
            lines.append(f"ld.global.{kind} {name}, [a{k}];")
    lines.append(body)
    for k, name in enumerate(targets.split(), len(sources.split())):
        lines.append(f"st.global.{_MEMORY[name[1]][0]} [a{k}], {name};")
    arrays = " ".join(f"a{k}:u64" for k in range(len(names)))
    return ptx(f"{arrays} n:u32", "\n".join([*lines, "FINISH:"]))


# Numba kernels, compiled as the project compiles its own


def compiled(kernel: Any, arguments: Any, threads: int, target: str, lineinfo: bool = False) -> str:
    """The PTX of a kernel, linked with link-time optimization."""
    ltoir, _ = cuda.compile(
        kernel,
        arguments,
        device=False,
        abi="numba",
        cc=TARGETS[target],
        launch_bounds=(threads, 1),
        output="ltoir",
        lineinfo=lineinfo,
    )
    options = LinkerOptions(arch=target, link_time_optimization=True, ptx=True, lineinfo=lineinfo)
    code = Linker(ObjectCode.from_ltoir(ltoir), options=options).link("ptx").code
    return bytes(code).decode().rstrip("\0")
