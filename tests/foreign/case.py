"""A launch of a kernel of Triton, the values it is called with, and its check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.foreign.compiler import Launcher

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
NAMES = {E4M3: "E4M3", E5M2: "E5M2"}


@dataclass(frozen=True)
class Case:
    """One launch and its check.

    Attributes:
        kind: what of the hardware it is about.
    """

    kind: str
    name: str
    run: Callable[[Launcher], None]


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int, limit: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, tuple(shape), generator=generator).to(FP32).to(dtype)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    """Values over many binades."""
    generator = torch.Generator().manual_seed(seed)
    binades = torch.randint(-12, 8, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator) * torch.exp2(binades.float())


def words(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Integers of all sizes."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high, tuple(shape), dtype=dtype, generator=generator)
    return values >> torch.randint(0, torch.iinfo(dtype).bits - 2, tuple(shape), dtype=dtype, generator=generator)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal as numbers, in every element; NaN where NaN is expected."""
    a, b = actual.double(), expected.double()
    wrong = ((a != b) & ~(a.isnan() & b.isnan())).nonzero()
    assert actual.shape == expected.shape
    assert not len(wrong), f"{len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}"
