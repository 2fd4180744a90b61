"""Instructions computed for many operands at once, and the numbers to hold them against."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.emulator.samples import elementwise
from tests.ptx_on_cpu import Program

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


INTEGERS = {"s8": (-128, 127), "u8": (0, 255), "s16": (-(2**15), 2**15 - 1), "u16": (0, 2**16 - 1)}


def integers(width: int, count: int = 300) -> list[int]:
    rng = random.Random(width)
    edges = [0, 1, 2, 3, 31, 32, 33, (1 << width) - 1, (1 << width) - 2, 1 << width - 1, (1 << width - 1) - 1]
    return edges + [rng.getrandbits(rng.randint(1, width)) for _ in range(count)]


def as_tensor(values: list[int], width: int) -> torch.Tensor:
    kind = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    return torch.from_numpy(np.array(values, dtype=kind).view(f"i{width // 8}"))


def to_signed(x: int, width: int) -> int:
    return x - (1 << width) if x >> width - 1 else x


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
