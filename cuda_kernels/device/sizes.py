"""Integer arithmetic in plain Python, for the sizes of grids, tiles and copies."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up; both are integers, ``b`` is positive."""
    return -(-a // b)
