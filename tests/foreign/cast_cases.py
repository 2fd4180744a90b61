"""Triton's casts, against the formats' definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.float8_reference import cast as cast_reference
from tests.float8_reference import value_of_code
from tests.foreign.case import BF16, E4M3, E5M2, FP16, FP32, I32, NAMES, Case, assert_equal, normal
from tests.foreign.compiler import Launcher, Options
from tests.foreign.kernels import elementwise

# Casts


def _sixteen_bits(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit type, or float32's with these upper bits and as many between them."""
    codes = torch.arange(2**16, dtype=I32)
    if dtype != FP32:
        return codes.to(torch.int16).view(dtype)
    return torch.cat([(codes << 16).view(FP32), normal((2**15,), 5)])


def _narrowed(source: torch.dtype, target: torch.dtype, arch: int) -> Callable[[Launcher], None]:
    """To FP8: to the nearest, ties to even, saturating; as worked out in Python's numbers."""

    def run(launch: Launcher) -> None:
        x = _sixteen_bits(source)
        y = torch.zeros(len(x), dtype=target)
        launch(elementwise.cast, (-(-len(x) // 2048),), [x, y, len(x)], Options(arch), ROUNDING="rtne", BLOCK=2048)
        codes = torch.from_numpy(cast_reference(x.float().numpy(), 1.0, NAMES[target]))
        nan = x.isnan()
        assert torch.equal(y.view(torch.uint8)[~nan], codes[~nan])
        assert y.float()[nan].isnan().all()

    return run


def _halved(target: torch.dtype) -> Callable[[Launcher], None]:
    def run(launch: Launcher) -> None:
        x = _sixteen_bits(FP32)
        y = torch.zeros(len(x), dtype=target)
        launch(elementwise.cast, (-(-len(x) // 2048),), [x, y, len(x)], ROUNDING="rtne", BLOCK=2048)
        assert_equal(y, x.to(target))

    return run


def _widened(source: torch.dtype, target: torch.dtype) -> Callable[[Launcher], None]:
    """All 256 codes; but Triton's E5M2 to bfloat16 takes its infinities and NaNs for numbers."""

    def run(launch: Launcher) -> None:
        codes = torch.arange(256).to(torch.uint8)
        y = torch.zeros(256, dtype=target)
        launch(elementwise.cast, (1,), [codes.view(source), y, 256], ROUNDING=None, BLOCK=256)
        expected = torch.tensor([value_of_code(NAMES[source], code) for code in range(256)])
        taken = expected.isfinite() if (source, target) == (E5M2, BF16) else torch.ones(256, dtype=torch.bool)
        assert_equal(y[taken], expected[taken])

    return run


CASTS = [
    *(
        Case("cast", f"sm_{arch}-{str(source)[6:]}-{NAMES[target]}", _narrowed(source, target, arch))
        for arch in (89, 90)
        for source in (FP32, BF16, FP16)
        for target in (E4M3, E5M2)
    ),
    *(Case("cast", f"float32-{str(target)[6:]}", _halved(target)) for target in (BF16, FP16)),
    *(
        Case("cast", f"{NAMES[source]}-{str(target)[6:]}", _widened(source, target))
        for source in (E4M3, E5M2)
        for target in (FP32, BF16, FP16)
    ),
]
