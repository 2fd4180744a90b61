"""Calls of an op's specification on the CPU, noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_fp8.ops.op import Op


def note_calls(monkeypatch: pytest.MonkeyPatch, op: Op, note: Callable[..., object]) -> None:
    """Call ``note`` with the arguments of each call that computes the op on CPU tensors, before it does."""
    compute = op.implementations["cpu"]

    def noted(*args: Any) -> Any:
        note(*args)
        return compute(*args)

    monkeypatch.setitem(op.implementations, "cpu", noted)
