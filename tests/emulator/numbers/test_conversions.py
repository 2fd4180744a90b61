"""The emulator's conversions of numbers against exact fractions, numpy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.emulator.numbers.computed import (
    INTEGERS,
    as_tensor,
    compute,
    each,
    float_patterns,
    integers,
    rounded,
    same,
    to_signed,
)
from tests.emulator.samples import needs_gcc

pytestmark = needs_gcc


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
