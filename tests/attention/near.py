"""FP8 attention as a test calls it, and how near to its definition it comes."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_fp8 import DotProductAttention, fp8_autocast
from tests.attention.ops.attention_cases import NAMES


def fp8(recipe: str = "tensorwise", **fields: Any) -> fp8_autocast:
    return fp8_autocast(fp8_recipe={"name": recipe, "fp8_dpa": True, **fields})


def in_fp8(module: DotProductAttention, *args: Any, recipe: str = "tensorwise", **arguments: Any) -> Tensor:
    with fp8(recipe):
        return module(*args, **arguments)


def assert_near(found: Any, truth: Any, tolerance: float = 0.11) -> None:
    for name, ours, right in zip(NAMES, found, truth):
        assert ours.shape == right.shape, name
        # of one visible key the gradients of scores are 0 in theory
        assert (ours.double() - right).norm() <= tolerance * right.norm() + 0.003 * math.sqrt(right.numel()), name
