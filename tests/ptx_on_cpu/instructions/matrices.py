"""ldmatrix, stmatrix, mma and wgmma."""

from __future__ import annotations

import re

from tests.ptx_on_cpu.parse import Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_ELEMENTS = {"e4m3": "E4M3", "e5m2": "E5M2", "bf16": "BF16", "f16": "F16"}


def _k_of(element: str) -> int:
    """K of one instruction: 32 bytes of a row."""
    return 32 if element in ("e4m3", "e5m2") else 16


def _listing(w: Writer, registers: list[str], kind: str = "b32") -> str:
    return ", ".join(w.value(r, kind) for r in registers)


@instruction("ldmatrix", "stmatrix", types="b16", options="sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def move_matrices(w: Writer, i: Instruction) -> None:
    is_store = i.opcode == "stmatrix"
    registers, address = i.operands[::-1] if is_store else i.operands
    names = w.vector(registers)
    if f"x{len(names)}" not in i.modifiers:
        raise Unsupported(f"{i.opcode} with {len(names)} registers")
    w.mark()
    with w.braces():
        w.emit(
            f"MatrixMove move = {{.address = {w.address(address)}, .count = {len(names)}, "
            f".transpose = {int(i.has('trans'))}, .store = {int(is_store)}}};"
        )
        if is_store:
            w.emit(f"u32 stored[] = {{{_listing(w, names)}}};", "memcpy(move.registers, stored, sizeof stored);")
        w.emit("rt_move_matrices(t, &move);")
        if not is_store:
            for k, name in enumerate(names):
                w.assign(name, "b32", f"move.registers[{k}]")


@instruction("mma", options="sync aligned m16n8k16 m16n8k32 row col f32 kind::f8f6f4 e4m3 e5m2 bf16 f16")
def mma(w: Writer, i: Instruction) -> None:
    result, a_type, b_type, accumulator = i.modifiers[-4:]
    k = _k_of(a_type)
    layout = i.has("row") and i.has("col") and i.has(f"m16n8k{k}")
    mixed = k == 16 and a_type != b_type
    if (result, accumulator) != ("f32", "f32") or not layout or mixed or _k_of(b_type) != k:
        raise Unsupported(f"mma.{'.'.join(i.modifiers)}")
    d, a, b, c = (w.vector(o) for o in i.operands)
    w.mark()
    with w.braces():
        w.emit(
            f"Mma mma = {{.a_type = {_ELEMENTS[a_type]}, .b_type = {_ELEMENTS[b_type]}, .a = {{{_listing(w, a)}}}, "
            f".b = {{{_listing(w, b)}}}, .c = {{{_listing(w, c, 'f32')}}}}};"
        )
        w.emit("rt_mma(t, &mma);")
        for k, register in enumerate(d):
            w.assign(register, "f32", f"mma.d[{k}]")


@instruction("wgmma", options="fence commit_group wait_group mma_async sync aligned f32 e4m3 e5m2 bf16 f16 m64n*")
def wgmma(w: Writer, i: Instruction) -> None:
    w.unit.uses_async_proxy = True
    w.mark()
    if i.has("fence"):
        w.emit("rt_wgmma_fence(t);")
    elif i.has("commit_group"):
        w.emit("rt_wgmma_commit(t);")
    elif i.has("wait_group"):
        accumulators = "&accumulators" if w.accumulators.numbers else "NULL"
        w.emit(f"rt_wgmma_wait(t, {w.bits(i.operands[0], 'u32')}, {accumulators});")
    else:
        _multiply_warpgroup(w, i)


def _multiply_warpgroup(w: Writer, i: Instruction) -> None:
    result, a_type, b_type = i.modifiers[-3:]
    shape = next((re.fullmatch(r"m64n(\d+)k(\d+)", m) for m in i.modifiers if m.startswith("m64")), None)
    known = a_type in _ELEMENTS and b_type in _ELEMENTS
    if shape is None or result != "f32" or not known or {_k_of(a_type), _k_of(b_type)} != {int(shape[2])}:
        raise Unsupported(f"wgmma.{'.'.join(i.modifiers)}")
    n = int(shape[1])
    accumulators, a, b, keep, negate_a, negate_b, *transposed = i.operands
    registers = w.vector(accumulators)
    if len(registers) != n // 2 or n % 8 or n > 256:
        raise Unsupported(f"wgmma of n = {n} with {len(registers)} accumulators")
    if any(t != "0" for t in transposed):
        raise Unsupported("wgmma of an operand that is not K-major")
    with w.braces():
        numbers = [w.register(register).number for register in registers]
        if None in numbers:
            raise Unsupported("wgmma with accumulators that do not have 32 bits")
        w.emit(f"static const u16 registers[] = {{{', '.join(map(str, numbers))}}};")
        w.emit(
            f"Wgmma wgmma = {{.a_type = {_ELEMENTS[a_type]}, .b_type = {_ELEMENTS[b_type]}, .n = {n}, "
            f".accumulators = &accumulators, .registers = registers, "
            f".b_descriptor = {w.bits(b, 'b64')}, .keep = {w.predicate(keep)}, "
            f".negate_a = {int(negate_a == '-1')}, .negate_b = {int(negate_b == '-1')}, "
            f".a_in_registers = {int(a.startswith('{'))}}};"
        )
        if a.startswith("{"):
            w.emit(*(f"wgmma.a[{k}] = {w.bits(register, 'b32')};" for k, register in enumerate(w.vector(a))))
        else:
            w.emit(f"wgmma.a_descriptor = {w.bits(a, 'b64')};")
        w.emit("rt_wgmma(t, &wgmma);")
