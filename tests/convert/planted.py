"""Rates of a GPU, planted for the CPU: FP8 and BF16 break even at 1 / (1/M + 1/N + 1/K) = 8, attention at 24 keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cuda_kernels.host import gemm_measurements

RECIPES = ("delayed", "tensorwise")
RATES: dict[str, Any] = {
    "linear": {"bf16": 1e12} | {name: {"flops": 2e12, "bytes": 4 / (6 * 8 * 0.5e-12)} for name in RECIPES},
    "attention": [
        {"channels": channels, "causal": causal, "shared": False, "flash": [100.0, 640.0], "fp8": [160.0, 320.0]}
        for channels in (8, 16)
        for causal in (False, True)
    ],
}


@contextmanager
def planted(rates: dict[str, Any] = RATES) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_measurements, "rates_on", lambda card: rates)
        yield
