"""Translates a PTX module to C source for the runtime."""

from __future__ import annotations

import re
from dataclasses import dataclass

import tests.ptx_on_cpu.instructions  # noqa: F401  (registers the translations of instructions)
from tests.ptx_on_cpu.errors import EmulatorError
from tests.ptx_on_cpu.parse import Function, Instruction, Module, Parameter, Variable, parse
from tests.ptx_on_cpu.writer import Unit, Unsupported, Writer, c_name


@dataclass(frozen=True)
class GlobalMemory:
    """A variable of the module, with its symbol in the compiled source."""

    symbol: str
    bytes: int
    writable: bool


@dataclass(frozen=True)
class Translation:
    source: str
    symbol: str  # of the kernel
    target: str  # sm_89, sm_90a, ...
    parameters: list[Parameter]
    memory: list[GlobalMemory]
    static_shared: int
    depot_bytes: int  # of local memory, summed over all functions
    uses_cp_async: bool
    uses_async_proxy: bool
    largest_block: int | None  # .maxntid
    cluster: tuple[int, int, int] | None  # .reqnctapercluster
    registers: int  # of a thread at entry; 0 if setmaxnreg is not used or has no effect


def translate(ptx: str) -> Translation:
    """The C source of a module with one kernel.

    Raises:
        EmulatorError: if the PTX cannot be parsed, has no or several kernels, or needs what is not supported.
    """
    module = parse(ptx)
    kernels = [f for f in module.functions.values() if f.is_entry]
    if len(kernels) != 1:
        raise EmulatorError(f"the PTX has {len(kernels)} entries, not one")
    kernel = kernels[0]
    unit = Unit(module)
    static_shared = _place_shared(module, unit)
    memory = [v for v in module.variables if v.space != "shared"]
    unit.global_names = {v.name for v in memory}
    writers = [_write(unit, f) for f in module.functions.values()]
    parts = ['#include "runtime.h"', *map(_definition, memory)]
    parts += [f"{_prototype(w.function)};" for w in writers]
    parts += [_c_function(w) for w in writers]
    return Translation(
        source="\n".join(parts) + "\n",
        symbol=_symbol(kernel),
        target=module.target,
        parameters=kernel.parameters,
        memory=[GlobalMemory(c_name("g_" + v.name), v.size or 0, v.space == "global") for v in memory],
        static_shared=static_shared,
        depot_bytes=sum(w.depot_bytes for w in writers),
        uses_cp_async=unit.uses_cp_async,
        uses_async_proxy=unit.uses_async_proxy,
        largest_block=_product(_numbers("maxntid", kernel)),
        cluster=_numbers("reqnctapercluster", kernel),
        registers=_registers_at_entry(kernel),
    )


def _place_shared(module: Module, unit: Unit) -> int:
    """Assigns offsets to the shared variables; dynamic memory comes last. Returns the offset where it starts."""
    size, align = 0, 1
    shared = [v for v in module.variables if v.space == "shared"]
    for variable in shared:
        if variable.size is not None:
            offset = -(-size // variable.align) * variable.align
            unit.shared_offsets[variable.name] = offset
            size = offset + variable.size
        else:
            align = max(align, variable.align, 16)
    start = -(-size // align) * align
    unit.shared_offsets |= {v.name: start for v in shared if v.size is None}
    return start


def _write(unit: Unit, function: Function) -> Writer:
    writer = Writer(unit, function)
    for statement in function.statements:
        try:
            writer.write(statement)
        except Unsupported as error:
            text = " ".join(statement.text.split())[:200]
            raise EmulatorError(f"PTX line {statement.line}: not supported: {error}: {text}") from error
        except (ValueError, IndexError, KeyError) as error:
            text = " ".join(statement.text.split())[:200]
            raise EmulatorError(f"PTX line {statement.line}: not understood: {text}") from error
    return writer


def _definition(variable: Variable) -> str:
    size = variable.size or len(variable.data) or 1
    data = ", ".join(map(str, variable.data.rstrip(b"\0"))) or "0"
    return (
        f"u8 {c_name('g_' + variable.name)}[{size}] __attribute__((aligned({max(variable.align, 16)}))) = {{{data}}};"
    )


def _symbol(function: Function) -> str:
    return c_name(("k_" if function.is_entry else "f_") + function.name)


def _prototype(function: Function) -> str:
    if function.is_entry:
        return f"void {_symbol(function)}(Thread *t, const u8 *parameters)"
    return f"static void {_symbol(function)}(Thread *t, const u8 *parameters, u8 *result)"


def _c_function(writer: Writer) -> str:
    lines = [f"#define DEPOT_BYTES {writer.depot_bytes}", _prototype(writer.function), "{"]
    if writer.depot_bytes:
        lines.append("    u8 depot[DEPOT_BYTES] __attribute__((aligned(16)));")
    return "\n".join([*lines, *writer.declarations, *writer.lines, "}", "#undef DEPOT_BYTES"])


def _numbers(directive: str, kernel: Function) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{directive}\s+([\d,\s]+)", kernel.attributes)
    if not match:
        return None
    x, y, z = ([int(n) for n in match[1].split(",")] + [1, 1])[:3]
    return x, y, z


_REGISTERS_OF_A_BLOCK, _LARGEST_COUNT = 64 * 1024, 248


def _registers_at_entry(kernel: Function) -> int:
    """The largest number of registers that the directives allow, limited by the largest setmaxnreg of the kernel.

    ptxas chose the same in all inspected kernels: 168 for 384 threads, and 224 for 256 threads with a setmaxnreg of
    224. Without directives setmaxnreg is ignored, and the result is 0.
    """
    asked = [
        int(s.content.operands[0])
        for s in kernel.statements
        if isinstance(s.content, Instruction) and s.content.opcode == "setmaxnreg"
    ]
    fixed, threads = _numbers("maxnreg", kernel), _product(_numbers("maxntid", kernel) or _numbers("reqntid", kernel))
    if not asked or not (fixed or threads):
        return 0
    if fixed:
        return fixed[0]
    blocks = (_numbers("minnctapersm", kernel) or (1, 1, 1))[0]
    return min(_REGISTERS_OF_A_BLOCK // ((threads or 1) * blocks) // 8 * 8, _LARGEST_COUNT, max(asked))


def _product(numbers: tuple[int, int, int] | None) -> int | None:
    return numbers[0] * numbers[1] * numbers[2] if numbers else None
