"""cvt: between integers, floating-point numbers and FP8."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import BITS, Instruction
from tests.ptx_on_cpu.types import is_integer
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"
_FLOATS = "f16 bf16 f32 f64"
_FP8 = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_INTEGRAL = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@instruction(
    "cvt",
    types=f"{_INTEGERS} {_FLOATS} f16x2 bf16x2 e4m3x2 e5m2x2",
    options=f"{_INTEGERS} {_FLOATS} f16x2 bf16x2 e4m3x2 e5m2x2 rn rz rni rzi rmi rpi ftz sat satfinite relu",
)
def cvt(w: Writer, i: Instruction) -> None:
    target, source = i.modifiers[-2:]
    if source in _FP8:
        _from_fp8(w, i, target, source)
    elif target in _FP8:
        _to_fp8(w, i, target, source)
    elif target.endswith("x2"):
        _to_pair(w, i, target, source)
    elif is_integer(source) and is_integer(target):
        _between_integers(w, i, target, source)
    elif is_integer(target):
        _to_integer(w, i, target, source)
    elif is_integer(source):
        _from_integer(w, i, target, source)
    else:
        _between_floats(w, i, target, source)


def _require(i: Instruction, *allowed: str) -> None:
    """The modifiers before the two types."""
    for modifier in i.modifiers[:-2]:
        if modifier not in allowed:
            raise Unsupported(f"cvt.{'.'.join(i.modifiers)}")


def _relu(i: Instruction, x: str) -> str:
    return f"({x} < 0 ? 0.f : {x})" if i.has("relu") else x


def _to_fp8(w: Writer, i: Instruction, target: str, source: str) -> None:
    """Converts two numbers to two bytes; the first operand is the upper one."""
    _require(i, "rn", "satfinite", "relu")
    if source == "f32":
        high, low = (w.value(o, "f32") for o in i.operands[1:])
    elif source == "f16x2":
        low, high = w.halves(i.operands[1], source)
    else:
        raise Unsupported(f"cvt to {target} from {source}")
    convert = f"{_FP8[target]}_from"
    w.assign(i.operands[0], "b16", f"{convert}({_relu(i, low)}) | {convert}({_relu(i, high)}) << 8")


def _from_fp8(w: Writer, i: Instruction, target: str, source: str) -> None:
    _require(i, "rn")
    if target != "f16x2":
        raise Unsupported(f"cvt from {source} to {target}")
    value, bits = f"{_FP8[source]}_value", w.bits(i.operands[1], "b16")
    w.assign_halves(i.operands[0], target, f"{value}((u8){bits})", f"{value}((u8)({bits} >> 8))")


def _to_pair(w: Writer, i: Instruction, target: str, source: str) -> None:
    _require(i, "rn", "rz", "relu")
    if source != "f32" or (i.has("rz") and target != "bf16x2"):
        raise Unsupported(f"cvt.{'.'.join(i.modifiers)}")
    high, low = (_relu(i, w.value(o, "f32")) for o in i.operands[1:])
    writer = _narrow_writer(i, target[:-2])
    w.assign(i.operands[0], "b32", f"(u32){writer}({low}) | (u32){writer}({high}) << 16")


def _narrow_writer(i: Instruction, target: str) -> str:
    """The function that rounds a float32 to the bits of `target`."""
    return f"{target}_from_float{'_towards_zero' if i.has('rz') else ''}"


def _integral(i: Instruction, x: str, default: str = "") -> str:
    rounding = i.one_of(*_INTEGRAL) or default
    return f"{_INTEGRAL[rounding]}({x})" if rounding else x


def _between_floats(w: Writer, i: Instruction, target: str, source: str) -> None:
    _require(i, "rn", "rz", "relu", "ftz", "sat", *_INTEGRAL)
    x = w.value(i.operands[1], source)
    if i.has("ftz") and source == "f32":
        x = f"flush({x})"
    x = _relu(i, _integral(i, x))
    if i.has("sat"):
        x = f"saturate({x})"
    if i.has("rz"):
        if (target, source) != ("bf16", "f32"):
            raise Unsupported(f"cvt.{'.'.join(i.modifiers)}")
        w.assign(i.operands[0], "b16", f"{_narrow_writer(i, target)}({x})")
        return
    if target == "f32" and source == "f64":
        x = f"(float)({x})"
    if i.has("ftz") and target == "f32":
        x = f"flush({x})"
    w.assign(i.operands[0], target, x)


def _to_integer(w: Writer, i: Instruction, target: str, source: str) -> None:
    """Saturates. NaN is converted to 0 if both types have at most 32 bits, or else to the most significant bit."""
    _require(i, "ftz", "sat", *_INTEGRAL)
    x = w.value(i.operands[1], source)
    if i.has("ftz"):
        x = f"flush({x})"
    has_upper_bit = source == "f64" or BITS[target] == 64
    nan = f"(({target}){1 << BITS[target] - 1 if has_upper_bit else 0}ull)"
    w.assign(i.operands[0], target, f"{target}_from({_integral(i, f'(double){x}', 'rzi')}, {nan})")


def _from_integer(w: Writer, i: Instruction, target: str, source: str) -> None:
    _require(i, "rn")
    if BITS[target] == 16 and BITS[source] == 64:
        raise Unsupported(f"cvt.{'.'.join(i.modifiers)}")  # double would round first
    x = w.value(i.operands[1], source)
    w.assign(i.operands[0], target, f"({'float' if target == 'f32' else 'double'}){x}")


def _between_integers(w: Writer, i: Instruction, target: str, source: str) -> None:
    _require(i, "sat")
    x = w.value(i.operands[1], source)
    if i.has("sat"):
        bits = BITS[target]
        if bits == 64:
            raise Unsupported("cvt.sat to 64 bits")
        least, largest = (-(1 << bits - 1), (1 << bits - 1) - 1) if target[0] == "s" else (0, (1 << bits) - 1)
        x = f"((s128){x} < {least}ll ? {least}ll : (s128){x} > {largest}ll ? {largest}ll : (s64){x})"
    w.assign(i.operands[0], target, x)
