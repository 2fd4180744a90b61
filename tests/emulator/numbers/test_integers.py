"""The emulator's integer arithmetic against Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.emulator.numbers.computed import as_tensor, compute, each, integers, to_signed
from tests.emulator.samples import needs_gcc

pytestmark = needs_gcc


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
