"""How ops are registered in ``torch.ops.lightning_fp8``; the ``schema.py`` of each operation calls it.

There stand an op's signature and its implementation for fake and meta tensors. ``reference.py`` registers what runs on
the CPU, ``cuda.py`` what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_fp8.arguments import TRANSFORM_WAYS_OUT

NAMESPACE = "lightning_fp8"

_vmap_refusals = torch.library.Library(NAMESPACE, "IMPL")


def define(name: str, schema: str) -> None:
    """Define ``torch.ops.lightning_fp8.<name>`` by a schema, such as ``"(Tensor x) -> Tensor"``."""
    torch.library.define(f"{NAMESPACE}::{name}", schema)


def fake(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the ops' implementation for fake and meta tensors; it gives tensors without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            torch.library.register_fake(f"{NAMESPACE}::{name}", function)
        return function

    return register


def implement(name: str, device_type: str, function: Callable[..., Any]) -> None:
    """Register what computes the op on ``"cpu"`` or ``"cuda"``."""
    torch.library.impl(f"{NAMESPACE}::{name}", device_type, function)


def refuse_vmap(*names: str) -> None:
    """Make vmap refuse ops, with a RuntimeError; its own loop is closed to ops that write to an argument."""

    def refuse(*args: object) -> None:
        raise RuntimeError(
            f"FP8 ops do not run under vmap, is_grads_batched=True or vectorize=True; {TRANSFORM_WAYS_OUT}"
        )

    for name in names:
        _vmap_refusals.impl(name, refuse, "FuncTorchBatched")
        _vmap_refusals.impl(name, refuse, "Batched")  # torch.autograd.grad(is_grads_batched=True)
