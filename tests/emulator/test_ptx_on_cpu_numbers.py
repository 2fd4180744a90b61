"""The emulator's arithmetic against Python's integers, exact fractions, numpy and torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.emulator.ptx_on_cpu_samples import elementwise, needs_gcc
from tests.ptx_on_cpu import Program

pytestmark = needs_gcc

DTYPES = {"h": torch.int16, "r": torch.int32, "d": torch.int64, "f": torch.float32, "e": torch.float64}


LETTERS = {dtype: letter for letter, dtype in DTYPES.items()}


@cache
def program(sources: str, targets: str, body: str) -> Program:
    return Program(elementwise(sources, targets, body))


def compute_all(body: str, targets: str, *arrays: torch.Tensor) -> list[torch.Tensor]:
    """`body` on each element of `arrays`, in registers %x0, %x1 ...: x tells the type, as it does in `targets`."""
    sources: list[str] = []
    for array in arrays:
        letter = LETTERS[array.dtype]
        sources.append(f"%{letter}{sum(s[1] == letter for s in sources)}")
    count = arrays[0].numel()
    results = [torch.zeros(count, dtype=DTYPES[target[1]]) for target in targets.split()]
    arguments: list[Any] = [*(array.contiguous() for array in arrays), *results, count]
    launch = program(" ".join(sources), targets, body).launch
    launch((-(-count // 256), 1, 1), (256, 1, 1), arguments, races=False)
    return results


def compute(body: str, target: str, *arrays: torch.Tensor) -> torch.Tensor:
    return compute_all(body, target, *arrays)[0]


def each(instructions: Iterable[str], letter: str, first: int, *arrays: torch.Tensor) -> list[list[int]]:
    """The results of several instructions, all in one kernel. Each has `{}` for its target register."""
    listed = list(instructions)
    targets = [f"%{letter}{first + k}" for k in range(len(listed))]
    body = "\n".join(instruction.format(target) for instruction, target in zip(listed, targets))
    return [result.tolist() for result in compute_all(body, " ".join(targets), *arrays)]


def float_patterns(count: int = 50_000) -> torch.Tensor:
    """float32 of every kind: random bits, and all bfloat16 with their neighbours, among them every tie."""
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint64)
    half = np.arange(1 << 16, dtype=np.uint64) << 16
    near = np.concatenate([half, half + 1, half + 0x7FFF, half + 0x8000, half + 0x8001])
    return torch.from_numpy(np.concatenate([bits, near]).astype(np.uint32).view(np.float32))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, except that all NaN are the same."""
    nan = actual.isnan() & expected.isnan()
    return bool((nan | ((actual == expected) & (actual.signbit() == expected.signbit()))).all())


# FP8


def fp8_value(code: int, fraction_bits: int, bias: int) -> float:
    """Of a non-negative code, by the definition of the format."""
    exponent, fraction = code >> fraction_bits, code & ((1 << fraction_bits) - 1)
    if exponent == 0:
        return float(math.ldexp(fraction, 1 - bias - fraction_bits))
    return float(math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits))


FP8 = {"e4m3": (3, 7, 0x7E, torch.float8_e4m3fn), "e5m2": (2, 15, 0x7B, torch.float8_e5m2)}


def nearest_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest code, the even one of two; saturated; NaN is 0x7f."""
    fraction_bits, bias, largest, _ = FP8[name]
    values = np.array([fp8_value(code, fraction_bits, bias) for code in range(largest + 1)])
    magnitude = np.minimum(np.abs(np.nan_to_num(x).astype(np.float64)), values[-1])
    above = np.searchsorted(values, magnitude).clip(1, largest)
    to_lower, to_upper = magnitude - values[above - 1], values[above] - magnitude
    is_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
    code = np.where(is_upper, above, above - 1) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


@pytest.mark.parametrize("name", FP8)
def test_float32_to_fp8(name: str) -> None:
    _, _, largest, _ = FP8[name]
    values = np.array([fp8_value(code, *FP8[name][:2]) for code in range(largest + 1)])
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near_ties = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    x = torch.cat([float_patterns(), torch.from_numpy(np.concatenate([near_ties, -near_ties]))])
    y = x.flip(0)
    packed = compute(f"cvt.rn.satfinite.{name}x2.f32 %h0, %f0, %f1;", "%h0", x, y).numpy().view(np.uint16)
    assert np.array_equal(packed >> 8, nearest_fp8(x.numpy(), name))
    assert np.array_equal(packed & 0xFF, nearest_fp8(y.numpy(), name))


@pytest.mark.parametrize("name", FP8)
def test_every_bfloat16_to_fp8_as_torch_casts_it(name: str) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    packed = compute(f"cvt.rn.satfinite.{name}x2.f32 %h0, %f0, %f0;", "%h0", x)
    largest = torch.finfo(FP8[name][3]).max
    expected = x.clamp(-largest, largest).to(FP8[name][3]).float()
    actual = packed.view(torch.uint8).view(-1, 2)[:, 0].contiguous().view(FP8[name][3]).float()
    assert same(actual, expected)


@pytest.mark.parametrize("name", FP8)
def test_float16_pairs_to_fp8(name: str) -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32)
    pairs = codes | (codes.flip(0) << 16)
    packed = compute(f"cvt.rn.satfinite.{name}x2.f16x2 %h0, %r0;", "%h0", pairs).numpy().view(np.uint16)
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(packed & 0xFF, nearest_fp8(x, name))
    assert np.array_equal(packed >> 8, nearest_fp8(x[::-1], name))


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_to_float16(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int16)
    packed = compute(f"cvt.rn.f16x2.{name}x2 %r0, %h0;", "%r0", codes | (codes.flip(0) << 8))
    halves = packed.view(torch.float16).view(-1, 2)
    expected = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8[name][3]).to(torch.float16)
    assert same(halves[:, 0], expected)
    assert same(halves[:, 1], expected.flip(0))


# Other conversions


def test_float32_to_bfloat16() -> None:
    x = float_patterns()
    assert same(compute("cvt.rn.bf16.f32 %h0, %f0;", "%h0", x).view(torch.bfloat16), x.bfloat16())
    pairs = compute("cvt.rn.bf16x2.f32 %r0, %f0, %f1;", "%r0", x, -x).view(torch.bfloat16).view(-1, 2)
    assert same(pairs[:, 1], x.bfloat16())
    assert same(pairs[:, 0], (-x).bfloat16())


def test_float32_to_bfloat16_towards_zero() -> None:
    x = float_patterns()
    x = x[~x.isnan()]
    towards_zero = compute("cvt.rz.bf16.f32 %h0, %f0;", "%h0", x)
    assert torch.equal(towards_zero, (x.view(torch.int32) >> 16).to(torch.int16))


def test_float32_and_float16() -> None:
    x = float_patterns()
    half = compute("cvt.rn.f16.f32 %h0, %f0;", "%h0", x).view(torch.float16)
    assert same(half, x.to(torch.float16))
    assert same(compute("cvt.f32.f16 %f0, %h0;", "%f0", half.view(torch.int16)), half.float())
    pairs = compute("cvt.rn.f16x2.f32 %r0, %f0, %f1;", "%r0", x, -x).view(torch.float16).view(-1, 2)
    assert same(pairs[:, 1], x.to(torch.float16))


def test_every_bfloat16_to_float32() -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    assert same(compute("cvt.f32.bf16 %f0, %h0;", "%f0", codes), codes.view(torch.bfloat16).float())


def test_float32_and_float64() -> None:
    x = float_patterns()
    double = x.double() * (1 + 2**-30)
    assert same(compute("cvt.rn.f32.f64 %f0, %e0;", "%f0", double), double.float())
    assert same(compute("cvt.f64.f32 %e0, %f0;", "%e0", x), x.double())


def test_relu_ftz_and_saturation_of_conversions() -> None:
    x = torch.tensor([-2.0, -0.25, 0.25, 0.75, 3.0, 1e-40, math.inf, -math.inf])
    relu = compute("cvt.rn.relu.bf16.f32 %h0, %f0;", "%h0", x).view(torch.bfloat16)
    assert relu.tolist() == x.clamp(min=0).bfloat16().tolist()
    assert compute("cvt.sat.f32.f32 %f1, %f0;", "%f1", x).tolist() == x.clamp(0, 1).tolist()
    assert compute("cvt.ftz.f32.f32 %f1, %f0;", "%f1", x)[5] == 0


ROUND: dict[str, Callable[[float], int]] = {
    "rni": lambda x: round(x),
    "rzi": lambda x: math.trunc(x),
    "rmi": lambda x: math.floor(x),
    "rpi": lambda x: math.ceil(x),
}
INTEGERS = {"s8": (-128, 127), "u8": (0, 255), "s16": (-(2**15), 2**15 - 1), "u16": (0, 2**16 - 1)}
INTEGERS |= {"s32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "s64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1)}


@pytest.mark.parametrize("kind", INTEGERS)
def test_float32_to_integer(kind: str) -> None:
    x = float_patterns(2000)[::37]
    x = torch.cat([x, torch.arange(-20, 20) / 4, torch.tensor([math.inf, -math.inf, math.nan])])
    letter, width = ("d", 64) if kind.endswith("64") else ("r", 32)
    least, largest = INTEGERS[kind]
    columns = each((f"cvt.{rounding}.{kind}.f32 {{}}, %f0;" for rounding in ROUND), letter, 0, x)
    for rounding, column in zip(ROUND.values(), columns):
        for value, result in zip(x.tolist(), column):
            if math.isnan(value):
                expected = (1 << 63) if width == 64 else 0
            elif math.isinf(value):
                expected = largest if value > 0 else least
            else:
                expected = min(max(rounding(value), least), largest)
            assert result % (1 << width) == expected % (1 << width), (value, kind)


def test_nan_of_float64_to_integer() -> None:
    nan = torch.tensor([math.nan], dtype=torch.float64)
    assert compute("cvt.rzi.s32.f64 %r0, %e0;", "%r0", nan).item() == -(2**31)
    assert compute("cvt.rzi.u64.f64 %d0, %e0;", "%d0", nan).item() == -(2**63)


def integers(width: int, count: int = 300) -> list[int]:
    rng = random.Random(width)
    edges = [0, 1, 2, 3, 31, 32, 33, (1 << width) - 1, (1 << width) - 2, 1 << width - 1, (1 << width - 1) - 1]
    return edges + [rng.getrandbits(rng.randint(1, width)) for _ in range(count)]


def as_tensor(values: list[int], width: int) -> torch.Tensor:
    kind = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    return torch.from_numpy(np.array(values, dtype=kind).view(f"i{width // 8}"))


def to_signed(x: int, width: int) -> int:
    return x - (1 << width) if x >> width - 1 else x


@pytest.mark.parametrize("target", ["f32", "f64"])
@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_to_float(kind: str, target: str) -> None:
    width = int(kind[1:])
    xs = integers(width)
    source = {16: "%h0", 32: "%r0", 64: "%d0"}[width]
    register = "%f0" if target == "f32" else "%e0"
    actual = compute(f"cvt.rn.{target}.{kind} {register}, {source};", register, as_tensor(xs, width))
    for x, result in zip(xs, actual.tolist()):
        exact = to_signed(x, width) if kind[0] == "s" else x
        bits, least = (24, -149) if target == "f32" else (53, -1074)
        assert Fraction(result) == rounded(Fraction(exact), bits, least), (kind, exact)


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integer_to_integer(source: str) -> None:
    width = int(source[1:])
    xs = integers(width)
    register = "%r0" if width == 32 else "%d0"
    targets = [target for target in INTEGERS if not target.endswith("64")]
    instructions = [
        f"cvt{saturate}.{target}.{source} {{}}, {register};" for target in targets for saturate in ("", ".sat")
    ]
    columns = iter(each(instructions, "r", 1, as_tensor(xs, width)))
    for target in targets:
        (least, largest), bits = INTEGERS[target], int(target[1:])
        for wrapped, saturated, x in zip(next(columns), next(columns), xs):
            value = to_signed(x, width) if source[0] == "s" else x
            part = value % (1 << bits)
            expected = to_signed(part, bits) if target[0] == "s" else part
            assert wrapped % 2**32 == expected % 2**32, (target, x)
            assert saturated % 2**32 == min(max(value, least), largest) % 2**32, (target, x)


# Floating-point arithmetic, exactly


def rounded(x: Fraction, bits: int, least_exponent: int) -> Fraction:
    """To nearest, ties to even, of a format with `bits` of significand and the smallest step 2**least_exponent."""
    if x == 0:
        return x
    exponent = math.floor(math.log2(abs(x))) if abs(x) < 2**1000 else 0
    while Fraction(2) ** exponent > abs(x):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(x):
        exponent += 1
    step = Fraction(2) ** max(exponent - bits + 1, least_exponent)
    return round(x / step) * step


FORMATS = {"bf16": (8, -133, torch.bfloat16), "f16": (11, -24, torch.float16), "f32": (24, -149, torch.float32)}
ARITHMETIC: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: x - y,
    "mul": lambda x, y, z: x * y,
    "fma": lambda x, y, z: x * y + z,
}


def operands(kind: str, count: int = 1500) -> tuple[torch.Tensor, ...]:
    """Numbers of similar and of very different size, so that sums need every bit."""
    generator = torch.Generator().manual_seed(3)
    dtype = FORMATS[kind][2]
    columns = []
    for spread in (2, 4, 10):
        significand = 1 + torch.rand(count, generator=generator)
        exponent = torch.randint(-spread, spread + 1, (count,), generator=generator)
        sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        columns.append((sign * significand * 2.0**exponent).to(dtype))
    return tuple(columns)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("operation", ARITHMETIC)
def test_arithmetic_rounds_once(operation: str, kind: str) -> None:
    x, y, z = operands(kind)
    letter, view = ("h", torch.int16) if kind != "f32" else ("f", torch.float32)
    sources = f"%{letter}0, %{letter}1" + (f", %{letter}2" if operation == "fma" else "")
    body = f"{operation}.rn.{kind} %{letter}3, {sources};"
    actual = compute(body, f"%{letter}3", x.view(view), y.view(view), z.view(view)).view(x.dtype)
    bits, least, _ = FORMATS[kind]
    for a, b, c, result in zip(x.tolist(), y.tolist(), z.tolist(), actual.tolist()):
        exact = ARITHMETIC[operation](Fraction(a), Fraction(b), Fraction(c))
        assert Fraction(result) == rounded(exact, bits, least), (operation, kind, a, b, c)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_arithmetic_of_pairs(kind: str) -> None:
    columns = [x.view(-1, 2).contiguous().view(torch.int32).flatten() for x in operands(kind)]
    single = [x.view(torch.int16) for x in operands(kind)]
    for operation in ("fma", "add", "max"):
        suffix = ", %{0}2" if operation == "fma" else ""
        rn = "" if operation == "max" else ".rn"
        pairs = compute(f"{operation}{rn}.{kind}x2 %r3, %r0, %r1{suffix.format('r')};", "%r3", *columns)
        ones = compute(f"{operation}{rn}.{kind} %h3, %h0, %h1{suffix.format('h')};", "%h3", *single)
        assert torch.equal(pairs.view(torch.int16), ones)


@pytest.mark.parametrize("term", [2.0**-20, 2.0**-60])
def test_fma_of_bfloat16_is_not_rounded_to_a_tie_first(term: float) -> None:
    """7 * 37 = 259 and 9 * 29 = 261 lie between two bfloat16; a term that float32, or even float64, loses decides."""
    x = torch.tensor([7.0, 7.0, 9.0, 9.0]).bfloat16().view(torch.int16)
    y = torch.tensor([37.0, 37.0, 29.0, 29.0]).bfloat16().view(torch.int16)
    z = torch.tensor([term, -term, term, -term]).bfloat16().view(torch.int16)
    actual = compute("fma.rn.bf16 %h3, %h0, %h1, %h2;", "%h3", x, y, z).view(torch.bfloat16)
    assert actual.tolist() == [260, 258, 262, 260]


def test_flushing_subnormals() -> None:
    x = torch.tensor([1e-40, -1e-40, 2e-38, 1.0])
    assert compute("add.ftz.f32 %f1, %f0, 0f00000000;", "%f1", x).tolist() == [0, 0, x[2].item(), 1]
    assert compute("mul.ftz.f32 %f1, %f0, 0f3F000000;", "%f1", x).tolist() == [0, 0, 0, 0.5]
    assert compute("mul.f32 %f1, %f0, 0f3F000000;", "%f1", x).tolist() == (x / 2).tolist()


def test_minimum_and_maximum_of_nan_and_zeros() -> None:
    x = torch.tensor([math.nan, 1.0, math.nan, -0.0, 0.0, -3.0])
    y = torch.tensor([2.0, math.nan, math.nan, 0.0, -0.0, 4.0])
    assert same(compute("max.f32 %f2, %f0, %f1;", "%f2", x, y), torch.tensor([2.0, 1.0, math.nan, 0.0, 0.0, 4.0]))
    assert same(compute("min.f32 %f2, %f0, %f1;", "%f2", x, y), torch.tensor([2.0, 1.0, math.nan, -0.0, -0.0, -3.0]))
    assert same(compute("max.NaN.f32 %f2, %f0, %f1;", "%f2", x, y), torch.tensor([math.nan] * 3 + [0.0, 0.0, 4.0]))


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_larger_magnitudes(kind: str, operation: str) -> None:
    """PTX ISA, max: of |a| and |b|, the sign of both by exclusive or; a NaN with .NaN is canonical, else it loses."""
    codes = torch.arange(1 << 16, dtype=torch.int32)
    others = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0)).int()
    others[:4], others[-4:] = torch.tensor([0, 0x8000, 0x7FFF, 0xFFFF]), torch.tensor([0x7F80, 0x7C00, 0xFC01, 1])
    pairs = codes | others << 16, others | codes << 16
    infinity = 0x7F80 if kind == "bf16" else 0x7C00
    a, b = codes & 0x7FFF, others & 0x7FFF
    a_nan, b_nan = a > infinity, b > infinity
    # Without their sign, bits of floats order as the floats do.
    chosen = torch.maximum(a, b) if operation == "max" else torch.minimum(a, b)
    signed = chosen | (codes ^ others) & 0x8000
    expected = torch.where(a_nan | b_nan, 0x7FFF, signed)
    actual = compute(f"{operation}.NaN.xorsign.abs.{kind}x2 %r2, %r0, %r1;", "%r2", *pairs)
    assert torch.equal(actual & 0xFFFF, expected)
    assert torch.equal(actual >> 16 & 0xFFFF, expected)
    numbers = ~(a_nan | b_nan)
    loses = compute(f"{operation}.xorsign.abs.{kind}x2 %r2, %r0, %r1;", "%r2", *pairs) & 0xFFFF
    assert torch.equal(loses[numbers], signed[numbers])
    assert torch.equal(loses[a_nan & ~b_nan] & 0x7FFF, b[a_nan & ~b_nan])
    assert (loses[a_nan & b_nan] == 0x7FFF).all()


def test_larger_magnitudes_of_float32() -> None:
    x = torch.tensor([math.nan, -1.0, -0.0, 1e-45, -math.inf, -3.0])
    y = torch.tensor([2.0, math.nan, 0.0, -2e-45, 3.0, -2.0])
    expected = torch.tensor([math.nan, math.nan, -0.0, -2e-45, -math.inf, 3.0])
    assert same(compute("max.NaN.xorsign.abs.f32 %f2, %f0, %f1;", "%f2", x, y), expected)


def test_the_smaller_magnitude_with_the_sign_of_the_product() -> None:
    x, y = torch.tensor([3.0, -3.0, 3.0, -0.5]), torch.tensor([2.0, 2.0, -2.0, -2.0])
    assert compute("min.xorsign.abs.f32 %f2, %f0, %f1;", "%f2", x, y).tolist() == [2.0, -2.0, -2.0, 0.5]
    assert compute("max.xorsign.abs.f32 %f2, %f0, %f1;", "%f2", x, y).tolist() == [3.0, -3.0, -3.0, 2.0]


def test_pairs_of_float32() -> None:
    x, y = torch.tensor([0.1, -2.5, 1e30]), torch.tensor([0.7, 1.0, 3.0])
    pairs = "mov.b64 %d0, {%f0, %f1}; mov.b64 %d1, {%f1, %f0}; "
    for operation, expected in (("add", x + y), ("sub", x - y), ("mul", x * y)):
        body = f"{pairs} {operation}.rn.f32x2 %d2, %d0, %d1; mov.b64 {{%f2, %f3}}, %d2;"
        assert same(compute(body, "%f2", x, y), expected)


def test_signs_of_floats() -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = codes.view(torch.bfloat16)
    assert torch.equal(compute("abs.bf16 %h1, %h0;", "%h1", codes), x.abs().view(torch.int16))
    assert torch.equal(compute("neg.bf16 %h1, %h0;", "%h1", codes), (-x).view(torch.int16))
    pairs = float_patterns().view(torch.int32)
    assert torch.equal(compute("abs.bf16x2 %r1, %r0;", "%r1", pairs), pairs & 0x7FFF7FFF)


def test_approximations() -> None:
    x = torch.linspace(-20, 20, 4001)
    positive = x.exp()
    references = {
        "ex2.approx.ftz.f32 {}, %f0;": x.double().exp2(),
        "tanh.approx.f32 {}, %f0;": x.double().tanh(),
        "sin.approx.f32 {}, %f0;": x.double().sin(),
        "rcp.approx.ftz.f32 {}, %f1;": positive.double().reciprocal(),
        "rsqrt.approx.f32 {}, %f1;": positive.double().rsqrt(),
        "sqrt.rn.f32 {}, %f1;": positive.double().sqrt(),
        "lg2.approx.f32 {}, %f1;": positive.double().log2(),
        "div.full.f32 {}, 0f40400000, %f1;": 3 / positive.double(),
    }
    for (name, expected), column in zip(references.items(), each(references, "f", 2, x, positive)):
        torch.testing.assert_close(torch.tensor(column).double(), expected, rtol=2e-7, atol=1e-7, msg=name)


def test_comparisons() -> None:
    x = torch.tensor([1.0, 2.0, math.nan, -0.0])
    y = torch.tensor([1.0, 1.0, 1.0, 0.0])
    expected = {"eq": [1, 0, 0, 1], "ne": [0, 1, 0, 0], "neu": [0, 1, 1, 0], "gtu": [0, 1, 1, 0], "le": [1, 0, 0, 1]}
    expected |= {"num": [1, 1, 0, 1], "nan": [0, 0, 1, 0]}
    columns = each((f"setp.{name}.f32 %p0, %f0, %f1; selp.b32 {{}}, 1, 0, %p0;" for name in expected), "r", 0, x, y)
    assert columns == list(expected.values())


def test_both_predicates_of_a_comparison() -> None:
    x = torch.tensor([1.0, 2.0, math.nan])
    body = """
    setp.eq.u32 %p2, %r9, 0;
    setp.gt.and.f32 %p0|%p1, %f0, 0f3F800000, %p2;
    selp.b32 %r0, 2, 0, %p1;
    @%p0 add.u32 %r0, %r0, 1;
    """
    assert compute(body, "%r0", x).tolist() == [2, 1, 2]


# Integer arithmetic

S, U = to_signed, lambda x, width: x
Reference = Callable[..., int]


def _quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _field(x: int, start: int, length: int, width: int) -> int:
    return (x >> start) & ((1 << length) - 1) if start < width else 0


BINARY: dict[str, Reference] = {
    "add.u{w}": lambda x, y, w: x + y,
    "sub.s{w}": lambda x, y, w: x - y,
    "mul.lo.u{w}": lambda x, y, w: x * y,
    "mul.hi.u{w}": lambda x, y, w: x * y >> w,
    "mul.hi.s{w}": lambda x, y, w: S(x, w) * S(y, w) >> w,
    "div.u{w}": lambda x, y, w: x // y,
    "div.s{w}": lambda x, y, w: _quotient(S(x, w), S(y, w)),
    "rem.u{w}": lambda x, y, w: x % y,
    "rem.s{w}": lambda x, y, w: S(x, w) - S(y, w) * _quotient(S(x, w), S(y, w)),
    "min.s{w}": lambda x, y, w: min(S(x, w), S(y, w)),
    "max.u{w}": lambda x, y, w: max(x, y),
    "and.b{w}": lambda x, y, w: x & y,
    "or.b{w}": lambda x, y, w: x | y,
    "xor.b{w}": lambda x, y, w: x ^ y,
}


@pytest.mark.parametrize("width", [32, 64])
def test_integer_arithmetic(width: int) -> None:
    xs = integers(width)
    ys = [y or 1 for y in integers(width)[::-1]]
    letter = "r" if width == 32 else "d"
    instructions = (f"{name.format(w=width)} {{}}, %{letter}0, %{letter}1;" for name in BINARY)
    columns = each(instructions, letter, 2, as_tensor(xs, width), as_tensor(ys, width))
    for (name, reference), column in zip(BINARY.items(), columns):
        for x, y, result in zip(xs, ys, column):
            assert result % (1 << width) == reference(x, y, width) % (1 << width), (name, x, y)


@pytest.mark.parametrize("width", [32, 64])
def test_shifts(width: int) -> None:
    xs, letter = integers(width), "r" if width == 32 else "d"
    counts = [i % (width + 9) for i in range(len(xs))]
    references: dict[str, Reference] = {
        f"shl.b{width}": lambda x, n: x << n,
        f"shr.u{width}": lambda x, n: x >> n,
        f"shr.s{width}": lambda x, n: S(x, width) >> n,
    }
    instructions = (f"cvt.u32.u{width} %r9, %{letter}1; {name} {{}}, %{letter}0, %r9;" for name in references)
    columns = each(instructions, letter, 2, as_tensor(xs, width), as_tensor(counts, width))
    for (name, reference), column in zip(references.items(), columns):
        for x, n, result in zip(xs, counts, column):
            assert result % (1 << width) == reference(x, n) % (1 << width), (name, x, n)


def test_instructions_of_three_operands() -> None:
    xs, ys = integers(32), integers(32)[::-1]
    zs = integers(32)[7:] + integers(32)[:7]
    wrapped = lambda x, y, n: ((y << 32 | x) << (n % 32)) >> 32  # noqa: E731
    bytes_of = lambda x, y: [(y << 32 | x) >> 8 * i & 0xFF for i in range(8)]  # noqa: E731

    def permuted(x: int, y: int, selectors: int) -> int:
        result = 0
        for i in range(4):
            selector = selectors >> 4 * i & 15
            byte = bytes_of(x, y)[selector & 7]
            result |= ((255 if byte > 127 else 0) if selector & 8 else byte) << 8 * i
        return result

    def majority(x: int, y: int, z: int) -> int:
        return x & y | y & z | x & z

    references: dict[str, Reference] = {
        "mad.lo.s32 {}, %r0, %r1, %r2;": lambda x, y, z: x * y + z,
        "mad.hi.u32 {}, %r0, %r1, %r2;": lambda x, y, z: (x * y >> 32) + z,
        "shf.l.wrap.b32 {}, %r0, %r1, %r2;": wrapped,
        "shf.r.clamp.b32 {}, %r0, %r1, %r2;": lambda x, y, z: (y << 32 | x) >> min(z, 32),
        "prmt.b32 {}, %r0, %r1, %r2;": permuted,
        "lop3.b32 {}, %r0, %r1, %r2, 0xE8;": majority,
    }
    columns = each(references, "r", 3, as_tensor(xs, 32), as_tensor(ys, 32), as_tensor(zs, 32))
    for (name, reference), column in zip(references.items(), columns):
        for x, y, z, result in zip(xs, ys, zs, column):
            assert result % 2**32 == reference(x, y, z) % 2**32, (name, x, y, z)


def test_wide_products() -> None:
    xs, ys = integers(32), integers(32)[::-1]
    for sign, convert in (("s", to_signed), ("u", U)):
        actual = compute(f"mul.wide.{sign}32 %d0, %r0, %r1;", "%d0", as_tensor(xs, 32), as_tensor(ys, 32)).tolist()
        for x, y, result in zip(xs, ys, actual):
            assert result % 2**64 == convert(x, 32) * convert(y, 32) % 2**64


def test_bit_fields_and_counts() -> None:
    xs = integers(32)
    starts, lengths = [i % 35 for i in range(len(xs))], [i * 7 % 36 for i in range(len(xs))]
    tensors = as_tensor(xs, 32), as_tensor(starts, 32), as_tensor(lengths, 32)

    def inserted(x: int, start: int, length: int) -> int:
        mask = (((1 << length) - 1) << start) & 0xFFFFFFFF
        return (0x12345678 & ~mask) | ((x << start) & mask)

    references: dict[str, Reference] = {
        "bfe.u32 {}, %r0, %r1, %r2;": lambda x, s, n: _field(x, s, n, 32),
        "bfi.b32 {}, %r0, 0x12345678, %r1, %r2;": inserted,
        "clz.b32 {}, %r0;": lambda x, s, n: 32 - x.bit_length(),
        "popc.b32 {}, %r0;": lambda x, s, n: x.bit_count(),
        "brev.b32 {}, %r0;": lambda x, s, n: int(f"{x:032b}"[::-1], 2),
        "bfind.u32 {}, %r0;": lambda x, s, n: x.bit_length() - 1,
        "not.b32 {}, %r0;": lambda x, s, n: ~x,
        "abs.s32 {}, %r0;": lambda x, s, n: abs(to_signed(x, 32)),
        "neg.s32 {}, %r0;": lambda x, s, n: -x,
    }
    columns = each(references, "r", 3, *tensors)
    for (name, reference), column in zip(references.items(), columns):
        for x, start, length, result in zip(xs, starts, lengths, column):
            assert result % 2**32 == reference(x, start, length) % 2**32, (name, x, start, length)


def test_signed_bit_fields() -> None:
    """Bits above the field, and above the number, repeat the field's last bit."""
    xs = [0b1100, 0b1100, 0x80000000, 0x80000000, 5]
    cases = [(2, 2, -1), (2, 3, 3), (31, 1, -1), (28, 9, -8), (0, 0, 0)]
    starts, lengths, expected = zip(*cases)
    tensors = as_tensor(xs, 32), as_tensor(list(starts), 32), as_tensor(list(lengths), 32)
    assert compute("bfe.s32 %r3, %r0, %r1, %r2;", "%r3", *tensors).tolist() == list(expected)


def test_packing_moves() -> None:
    xs = as_tensor(integers(64), 64)
    halves = "mov.b64 {%r0, %r1}, %d0; mov.b64 %d1, {%r1, %r0};"
    assert torch.equal(
        compute(halves, "%d1", xs).view(torch.int32).view(-1, 2).flip(1), xs.view(torch.int32).view(-1, 2)
    )
    quarters = "mov.b64 {%h0, %h1, %h2, %h3}, %d0; mov.b64 %d1, {%h3, %h2, %h1, %h0};"
    reversed_ = compute(quarters, "%d1", xs).view(torch.int16).view(-1, 4).flip(1)
    assert torch.equal(reversed_, xs.view(torch.int16).view(-1, 4))


def test_narrow_conversions_extend_by_the_sign_of_their_type() -> None:
    x = torch.tensor([-5, 200], dtype=torch.int16)
    assert compute("cvt.s32.s8 %r0, %h0;", "%r0", x).tolist() == [-5, -56]
    assert compute("cvt.u32.u8 %r0, %h0;", "%r0", x).tolist() == [251, 200]
