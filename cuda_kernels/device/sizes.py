"""Dtypes by name, and integer arithmetic for the sizes of grids, tiles and copies."""

from __future__ import annotations

from typing import Literal

DtypeName = Literal["bfloat16", "float16", "float32"]
"""A dtype by name, since kernels do not import torch."""
ITEM_BYTES: dict[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up; both are integers, ``b`` is positive."""
    return -(-a // b)
