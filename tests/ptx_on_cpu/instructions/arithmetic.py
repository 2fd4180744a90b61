"""Arithmetic and comparisons. Approximate instructions return the correctly rounded result, or that of libm."""

from __future__ import annotations

from collections.abc import Callable

from tests.ptx_on_cpu.parse import BITS, Instruction
from tests.ptx_on_cpu.types import READERS, is_integer, signed, unsigned
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_INTEGERS = "u16 s16 u32 s32 u64 s64"
_FLOATS = "f16 bf16 f32 f64 f16x2 bf16x2 f32x2"


def elementwise(w: Writer, i: Instruction, formula: Callable[..., str]) -> None:
    """destination = formula(sources) for floating-point numbers; for packed types, of both halves."""
    kind, sources = i.type, i.operands[1:]
    if i.has("ftz") and kind not in ("f32", "bf16", "bf16x2", "f32x2"):
        raise Unsupported(f"{i.opcode}.ftz.{kind}")

    def result(values: list[str]) -> str:
        expression = formula(*(f"flush({v})" for v in values)) if i.has("ftz") else formula(*values)
        if i.has("sat"):
            expression = f"saturate({expression})"
        return f"flush({expression})" if i.has("ftz") else expression

    if kind.endswith("x2"):
        low, high = zip(*(w.halves(s, kind) for s in sources))
        w.assign_halves(i.operands[0], kind, result(list(low)), result(list(high)))
    else:
        w.assign(i.operands[0], kind, result([w.value(s, kind) for s in sources]))


def _modular(w: Writer, i: Instruction, formula: Callable[..., str]) -> None:
    """Integer arithmetic modulo a power of two; u64 keeps C from promoting to a signed type."""
    kind = i.type
    if i.has("sat"):
        if kind != "s32":
            raise Unsupported(f"{i.opcode}.sat.{kind}")
        w.assign(
            i.operands[0], kind, f"s32_from({formula(*(f'(double){w.value(x, kind)}' for x in i.operands[1:]))}, 0)"
        )
        return
    w.assign(i.operands[0], kind, formula(*(f"(u64){w.bits(x, kind)}" for x in i.operands[1:])))


@instruction("add", "sub", types=f"{_INTEGERS} {_FLOATS}", options="rn ftz sat")
def add(w: Writer, i: Instruction) -> None:
    sign = "+" if i.opcode == "add" else "-"
    (_modular if is_integer(i.type) else elementwise)(w, i, lambda x, y: f"({x} {sign} {y})")


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * BITS[kind]}"


def _product(w: Writer, i: Instruction) -> tuple[str, str]:
    """The type and the C expression of x * y for .lo, .hi or .wide."""
    kind = i.type
    if not i.has("wide", "hi"):
        return kind, f"(u64){w.bits(i.operands[1], kind)} * (u64){w.bits(i.operands[2], kind)}"
    big = f"{kind[0]}128"
    exact = f"({big}){w.value(i.operands[1], kind)} * ({big}){w.value(i.operands[2], kind)}"
    return (_wide(kind), exact) if i.has("wide") else (kind, f"({exact}) >> {BITS[kind]}")


@instruction("mul", types=f"{_INTEGERS} {_FLOATS}", options="rn ftz sat lo hi wide")
def mul(w: Writer, i: Instruction) -> None:
    if not is_integer(i.type):
        elementwise(w, i, lambda x, y: f"({x} * {y})")
        return
    kind, product = _product(w, i)
    w.assign(i.operands[0], kind, product)


@instruction("mad", types=f"{_INTEGERS} f32 f64", options="rn ftz sat lo hi wide")
def mad(w: Writer, i: Instruction) -> None:
    if not is_integer(i.type):
        fma(w, i)
        return
    if i.has("sat"):
        raise Unsupported("mad.sat")
    kind, product = _product(w, i)
    w.assign(i.operands[0], kind, f"(u64)({product}) + (u64){w.bits(i.operands[3], kind)}")


@instruction("fma", types=_FLOATS, options="rn ftz sat")
def fma(w: Writer, i: Instruction) -> None:
    function = {"f32": "fmaf", "f32x2": "fmaf", "f64": "fma"}.get(i.type, "fma_to_odd")
    elementwise(w, i, lambda x, y, z: f"{function}({x}, {y}, {z})")


@instruction("div", types=f"{_INTEGERS} f32 f64", options="rn approx full ftz")
def div(w: Writer, i: Instruction) -> None:
    kind = i.type
    if not is_integer(kind):
        elementwise(w, i, lambda x, y: f"({x} / {y})")
        return
    x, y = w.value(i.operands[1], kind), w.value(i.operands[2], kind)
    # Division by zero is undefined in PTX, and by -1 it may overflow in C.
    overflow = f"{y} == -1 ? ({signed(kind)})(0 - (u64){x}) : " if kind[0] == "s" else ""
    w.assign(i.operands[0], kind, f"({y} == 0 ? ({unsigned(kind)})-1 : {overflow}{x} / {y})")


@instruction("rem", types=_INTEGERS)
def rem(w: Writer, i: Instruction) -> None:
    kind = i.type
    x, y = w.value(i.operands[1], kind), w.value(i.operands[2], kind)
    overflow = f"{y} == -1 ? 0 : " if kind[0] == "s" else ""
    w.assign(i.operands[0], kind, f"({y} == 0 ? {x} : {overflow}{x} % {y})")


_SIGN_BITS = {
    "f16": "0x8000u",
    "bf16": "0x8000u",
    "f16x2": "0x80008000u",
    "bf16x2": "0x80008000u",
    "f32": "0x80000000u",
}
_SIGN_BITS["f64"] = "0x8000000000000000ull"


def _change_sign(w: Writer, i: Instruction, formula: str) -> None:
    """neg and abs of a floating-point number change only the sign bit, also of a NaN."""
    kind = f"b{BITS[i.type]}"
    changed = formula.format(x=w.bits(i.operands[1], kind), sign=_SIGN_BITS[i.type])
    if i.has("ftz"):
        if i.type != "f32":
            raise Unsupported(f"{i.opcode}.ftz.{i.type}")
        changed = f"bits_of(flush(float_of({changed})))"
    w.assign(i.operands[0], kind, changed)


@instruction("neg", types=f"s16 s32 s64 {_FLOATS}", options="ftz")
def neg(w: Writer, i: Instruction) -> None:
    if is_integer(i.type):
        w.assign(i.operands[0], i.type, f"0 - (u64){w.bits(i.operands[1], i.type)}")
    else:
        _change_sign(w, i, "({x} ^ {sign})")


@instruction("abs", types=f"s16 s32 s64 {_FLOATS}", options="ftz")
def abs_(w: Writer, i: Instruction) -> None:
    if is_integer(i.type):
        x = w.value(i.operands[1], i.type)
        w.assign(i.operands[0], i.type, f"({x} < 0 ? 0 - (u64){x} : (u64){x})")
    else:
        _change_sign(w, i, "({x} & ~{sign})")


@instruction("min", "max", types=f"{_INTEGERS} {_FLOATS}", options="ftz NaN xorsign abs")
def minimum(w: Writer, i: Instruction) -> None:
    if i.has("xorsign") != i.has("abs") or (i.has("xorsign") and (is_integer(i.type) or i.type == "f64")):
        raise Unsupported(".".join((i.opcode, *i.modifiers)))
    if is_integer(i.type):
        x, y = (w.value(o, i.type) for o in i.operands[1:])
        w.assign(i.operands[0], i.type, f"({x} {'<' if i.opcode == 'min' else '>'} {y} ? {x} : {y})")
        return
    function = "smaller" if i.opcode == "min" else "larger"

    def formula(x: str, y: str, z: str = "") -> str:
        if z:  # three operands, since sm_100
            y = formula(y, z)
        result = f"{function}({x}, {y})"
        if i.has("xorsign"):  # of the magnitudes, with the sign of the product
            result = f"sign_of_product({x}, {y}, {function}(fabs({x}), fabs({y})))"
        if i.has("NaN"):
            result = f"nan_if_either({x}, {y}, {result})"
        return result if i.type == "f64" else f"canonical({result})"

    elementwise(w, i, formula)


@instruction("rcp", "sqrt", "rsqrt", types="f32 f64", options="rn approx ftz")
def reciprocal(w: Writer, i: Instruction) -> None:
    root = "sqrt" if i.type == "f64" else "sqrtf"
    one = "1.0" if i.type == "f64" else "1.0f"
    formulas = {"rcp": f"({one} / {{}})", "sqrt": f"{root}({{}})", "rsqrt": f"({one} / {root}({{}}))"}
    elementwise(w, i, formulas[i.opcode].format)


@instruction("ex2", "tanh", types="f16 bf16 f32 f16x2 bf16x2", options="approx ftz")
@instruction("lg2", "sin", "cos", types="f32", options="approx ftz")
def transcendental(w: Writer, i: Instruction) -> None:
    function = {"ex2": "exp2f", "lg2": "log2f"}.get(i.opcode, f"{i.opcode}f")
    elementwise(w, i, lambda x: f"{function}({x})")


@instruction("copysign", types="f32 f64")
def copysign(w: Writer, i: Instruction) -> None:
    kind, sign = f"b{BITS[i.type]}", _SIGN_BITS[i.type]
    source, magnitude = w.bits(i.operands[1], kind), w.bits(i.operands[2], kind)
    w.assign(i.operands[0], kind, f"({magnitude} & ~{sign}) | ({source} & {sign})")


@instruction("testp", types="f32 f64", options="finite infinite number notanumber normal subnormal")
def testp(w: Writer, i: Instruction) -> None:
    tests = {
        "finite": "isfinite({x})",
        "infinite": "isinf({x})",
        "number": "!isnan({x})",
        "notanumber": "isnan({x})",
        "normal": "isnormal({x})",
        "subnormal": "(fpclassify({x}) == FP_SUBNORMAL)",
    }
    test = tests[i.modifiers[0]].format(x=f"{READERS[i.type]}({w.bits(i.operands[1], i.type)})")
    w.assign(i.operands[0], "pred", test)


# setp, set, selp and slct

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
