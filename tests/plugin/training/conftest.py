"""FP8 GEMMs that a test counts."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from lightning_fp8.ops.gemm import scaled_mm_op
from tests.op_sides import note_calls

Gemms: TypeAlias = "Counter[tuple[torch.dtype, torch.dtype]]"


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    """How many FP8 GEMMs ran, by the dtypes of their operands."""
    counts: Gemms = Counter()

    def count(a: Tensor, scale_a: Tensor, b: Tensor, *others: Any) -> None:
        counts[a.dtype, b.dtype] += 1

    note_calls(monkeypatch, scaled_mm_op, count)
    return counts
