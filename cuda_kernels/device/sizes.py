"""Arithmetic on sizes in plain Python: grids, tiles and copies are computed with it before a kernel runs."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up; both are integers, ``b`` is positive."""
    return -(-a // b)
