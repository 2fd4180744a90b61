"""Logic, shifts, and instructions that move or count bits."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import BITS, Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_BITS = "b16 b32 b64"


@instruction("and", "or", "xor", types=f"pred {_BITS}")
def logic(w: Writer, i: Instruction) -> None:
    sign = {"and": "&", "or": "|", "xor": "^"}[i.opcode]
    target, *sources = i.operands
    read = w.predicate if i.type == "pred" else lambda s: w.bits(s, i.type)
    w.assign(target, i.type, f"({read(sources[0])} {sign} {read(sources[1])})")


@instruction("not", types=f"pred {_BITS}")
def not_(w: Writer, i: Instruction) -> None:
    target, source = i.operands
    w.assign(target, i.type, f"!{w.predicate(source)}" if i.type == "pred" else f"~{w.bits(source, i.type)}")


@instruction("cnot", types=_BITS)
def cnot(w: Writer, i: Instruction) -> None:
    w.assign(i.operands[0], i.type, f"({w.bits(i.operands[1], i.type)} == 0)")


@instruction("shl", "shr", types=f"{_BITS} u16 s16 u32 s32 u64 s64")
def shift(w: Writer, i: Instruction) -> None:
    """A shift by more than the width shifts out all bits."""
    width = BITS[i.type]
    x, count = w.value(i.operands[1], i.type), w.bits(i.operands[2], "u32")
    if i.opcode == "shl":
        w.assign(i.operands[0], i.type, f"({count} < {width} ? (u64){x} << {count} : 0)")
    elif i.type[0] == "s":
        w.assign(i.operands[0], i.type, f"({x} >> ({count} < {width} ? {count} : {width - 1}))")
    else:
        w.assign(i.operands[0], i.type, f"({count} < {width} ? {x} >> {count} : 0)")


@instruction("shf", types="b32", options="l r wrap clamp")
def funnel_shift(w: Writer, i: Instruction) -> None:
    low, high, count = (w.bits(o, "b32") for o in i.operands[1:])
    shift = f"({count} & 31)" if i.has("wrap") else f"({count} < 32 ? {count} : 32)"
    both = f"((u64){high} << 32 | {low})"
    w.assign(i.operands[0], "b32", f"({both} << {shift}) >> 32" if i.has("l") else f"{both} >> {shift}")


@instruction("prmt", types="b32")
def prmt(w: Writer, i: Instruction) -> None:
    a, b, selectors = (w.bits(o, "b32") for o in i.operands[1:])
    w.assign(i.operands[0], "b32", f"permute_bytes({a}, {b}, {selectors})")


@instruction("lop3", types="b32")
def lop3(w: Writer, i: Instruction) -> None:
    a, b, c, table = (w.bits(o, "b32") for o in i.operands[1:])
    w.assign(i.operands[0], "b32", f"logic3({a}, {b}, {c}, {table})")


@instruction("bfe", types="u32 s32 u64 s64")
def bfe(w: Writer, i: Instruction) -> None:
    x, start, length = w.bits(i.operands[1], i.type), *(w.bits(o, "u32") for o in i.operands[2:])
    is_signed = str(i.type[0] == "s").lower()
    w.assign(i.operands[0], i.type, f"extract_field({x}, {start}, {length}, {BITS[i.type]}, {is_signed})")


@instruction("bfi", types="b32 b64")
def bfi(w: Writer, i: Instruction) -> None:
    field, base = (w.bits(o, i.type) for o in i.operands[1:3])
    start, length = (w.bits(o, "u32") for o in i.operands[3:])
    w.assign(i.operands[0], i.type, f"insert_field({field}, {base}, {start}, {length}, {BITS[i.type]})")


@instruction("clz", "popc", types="b32 b64")
def count_bits(w: Writer, i: Instruction) -> None:
    x = w.bits(i.operands[1], i.type)
    if i.opcode == "popc":
        w.assign(i.operands[0], "u32", f"__builtin_popcountll({x})")
    else:
        w.assign(i.operands[0], "u32", f"({x} ? __builtin_clzll({x}) - {64 - BITS[i.type]} : {BITS[i.type]})")


@instruction("bfind", types="u32 s32 u64 s64", options="shiftamt")
def bfind(w: Writer, i: Instruction) -> None:
    """The position of the most significant 1, or of the most significant 0 of a negative number."""
    if i.has("shiftamt"):
        raise Unsupported("bfind.shiftamt")
    x = w.bits(i.operands[1], i.type)
    if i.type[0] == "s":
        x = f"({w.value(i.operands[1], i.type)} < 0 ? {w.bits(i.operands[1], i.type)} ^ ({w.bits('-1', i.type)}) : {x})"
    w.assign(i.operands[0], "u32", f"({x} ? 63 - __builtin_clzll({x}) : 0xffffffffu)")


@instruction("brev", types="b32 b64")
def brev(w: Writer, i: Instruction) -> None:
    w.assign(i.operands[0], i.type, f"reverse_bits({w.bits(i.operands[1], i.type)}, {BITS[i.type]})")
