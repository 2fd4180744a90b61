"""FP8 GEMMs that a test counts."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from lightning_fp8 import ops

Gemms: TypeAlias = "Counter[tuple[torch.dtype, torch.dtype]]"


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """How many FP8 GEMMs ran, by the dtypes of their operands."""
    counts: Gemms = Counter()
    scaled_mm = ops.scaled_mm

    def counting(a: Any, b: Any, **options: Any) -> Tensor:
        counts[a.data.dtype, b.data.dtype] += 1
        return scaled_mm(a, b, **options)

    monkeypatch.setattr(ops, "scaled_mm", counting)
    return counts
