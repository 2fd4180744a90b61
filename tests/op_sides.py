"""What computes an op on a device, called with as many arguments as a test has: what follows them is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_fp8.ops.op import Op


def kernels_of(op: Op) -> Callable[..., Any]:
    """The side that starts kernels, for tensors on any device."""
    return _side(op, "cuda")


def reference_of(op: Op) -> Callable[..., Any]:
    """The side in plain torch."""
    return _side(op, "cpu")


def _side(op: Op, device_type: str) -> Callable[..., Any]:
    function, num_arguments = op.implementations[device_type], len(op.types())
    return lambda *args: function(*args, *[None] * (num_arguments - len(args)))


def note_calls(monkeypatch: pytest.MonkeyPatch, op: Op, note: Callable[..., object]) -> None:
    """Call ``note`` with the arguments of each call that computes the op on CPU tensors, before it does."""
    compute = op.implementations["cpu"]

    def noted(*args: Any) -> Any:
        note(*args)
        return compute(*args)

    monkeypatch.setitem(op.implementations, "cpu", noted)
