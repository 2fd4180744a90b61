"""setp, set, selp and slct."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import BITS, Instruction
from tests.ptx_on_cpu.types import is_integer
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_TYPES = "b16 b32 b64 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64"
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}
_COMPARISONS = " ".join([*_ORDERED, *_UNSIGNED, *_UNORDERED, "num", "nan"])


def _comparison(w: Writer, i: Instruction, kind: str) -> str:
    name = i.modifiers[0]
    x, y = (w.value(o, kind) for o in i.operands[1:3])
    if i.has("ftz"):
        x, y = f"flush({x})", f"flush({y})"
    if is_integer(kind):
        sign = _ORDERED.get(name) or _UNSIGNED.get(name)
        if sign is None:
            raise Unsupported(f"{i.opcode}.{name}.{kind}")
        return f"({x} {sign} {y})"
    either_nan = f"(isnan({x}) || isnan({y}))"
    if name in ("num", "nan"):
        return either_nan if name == "nan" else f"!{either_nan}"
    if name in _UNORDERED:
        return f"({either_nan} || {x} {_UNORDERED[name]} {y})"
    if name in _ORDERED:
        return f"(!{either_nan} && {x} {_ORDERED[name]} {y})"
    raise Unsupported(f"{i.opcode}.{name}.{kind}")


@instruction("setp", types=_TYPES, options=f"{_COMPARISONS} and or xor ftz")
def setp(w: Writer, i: Instruction) -> None:
    targets = [t.strip() for t in i.operands[0].split("|")]
    combine = ""
    if logic := i.one_of("and", "or", "xor"):
        combine = f" {dict(zip(('and', 'or', 'xor'), '&|^'))[logic]} {w.predicate(i.operands[3])}"
    with w.braces():
        w.emit(f"bool holds = {_comparison(w, i, i.type)};")
        w.emit(f"bool first = holds{combine}, second = !holds{combine};")
        for target, value in zip(targets, ("first", "second")):
            w.assign(target, "pred", value)


@instruction("set", types=_TYPES, options=f"{_COMPARISONS} ftz u32 s32 f32")
def set_(w: Writer, i: Instruction) -> None:
    result = i.modifiers[-2]
    true, false = ("1.0f", "0.0f") if result == "f32" else ("0xffffffffu", "0u")
    w.assign(i.operands[0], result, f"({_comparison(w, i, i.type)} ? {true} : {false})")


@instruction("selp", types=_TYPES)
def selp(w: Writer, i: Instruction) -> None:
    kind = f"b{BITS[i.type]}"
    x, y = (w.bits(o, kind) for o in i.operands[1:3])
    w.assign(i.operands[0], kind, f"({w.predicate(i.operands[3])} ? {x} : {y})")


@instruction("slct", types="s32 f32", options="b16 b32 b64 u16 s16 u32 s32 u64 s64 f32 f64 ftz")
def slct(w: Writer, i: Instruction) -> None:
    kind = f"b{BITS[i.modifiers[-2]]}"
    x, y = (w.bits(o, kind) for o in i.operands[1:3])
    w.assign(i.operands[0], kind, f"({w.value(i.operands[3], i.type)} >= 0 ? {x} : {y})")
