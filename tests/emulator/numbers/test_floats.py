"""The emulator's floating-point arithmetic against exact fractions, numpy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from tests.emulator.numbers.computed import compute, each, float_patterns, rounded, same
from tests.emulator.samples import needs_gcc

pytestmark = needs_gcc


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
