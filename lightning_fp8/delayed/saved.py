"""Validation of a saved FP8 state, and how it holds optimizer steps."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.delayed.spans import span_in


def validated_state(state: Any) -> tuple[list[str], Tensor, Tensor, int]:
    """The names, scales, amax history and update count of a saved state.

    Raises:
        ValueError: a key is missing or a value has the wrong type, dtype or shape; the message names it.
    """
    if not isinstance(state, dict):
        is_path = isinstance(state, (str, os.PathLike))
        way_out = "read the file first: torch.load(path)" if is_path else "save it with fp8_state_dict(model)"
        raise ValueError(f"FP8 state must be a dictionary, not {type(state).__name__}; {way_out}")
    missing = [key for key in ("names", "scale", "amax_history", "updates") if key not in state]
    if missing:
        inside = "".join(f"[{key!r}]" for key in ("FP8Precision", "model") if key in state)
        way_out = f"Pass what is inside: state{inside}" if inside else "Save it with fp8_state_dict(model)"
        raise ValueError(f"FP8 state lacks {missing}; it holds {sorted(map(str, state))[:10]}. {way_out}")
    names = state["names"]
    scale = state["scale"]
    amax_history = state["amax_history"]
    updates = state["updates"]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("FP8 state's 'names' must be a list of strings")
    if len(set(names)) < len(names):
        raise ValueError(f"FP8 state's 'names' holds {next(n for n in names if names.count(n) > 1)!r} more than once")
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise ValueError(f"FP8 state's 'updates' must be a count, not {updates!r}")
    for key, value, shape in (("scale", scale, (len(names),)), ("amax_history", amax_history, (None, len(names)))):
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise ValueError(
                f"FP8 state's {key!r} must be a float32 tensor, not {getattr(value, 'dtype', type(value))}"
            )
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"FP8 state's {key!r} must hold values, not be sparse or on meta; load it onto the CPU")
        if value.dim() != len(shape) or value.shape[-1] != shape[-1]:
            raise ValueError(f"FP8 state's {key!r} has shape {tuple(value.shape)} for {len(names)} names")
        if value.numel() and not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    steps_in(state)
    span_in(state)
    for key in ("seen", "counts"):  # amaxes that wait may be infinite or NaN: the next update passes over them
        value = state.get(key, scale)
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != (len(names),):
            raise ValueError(f"FP8 state's {key!r} must be float32 of shape ({len(names)},) where it is there")
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"FP8 state's {key!r} must hold values, not be sparse or on meta; load it onto the CPU")
        if key == "counts" and not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    return names, scale.detach(), amax_history.detach(), updates


def saved_steps(steps: int | None) -> dict[str, int]:
    """The entry of a saved state that holds optimizer steps since the last update: -1 where no optimizer is known."""
    return {"steps": -1 if steps is None else steps}


def steps_in(state: dict[str, Any]) -> int | None:
    """What :func:`saved_steps` was given; ``None`` for states of older versions and of others, which lack it.

    Raises:
        ValueError: it is no number of steps.
    """
    steps = state.get("steps", -1)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"FP8 state's 'steps' must be a count or -1, not {steps!r}")
    return None if steps < 0 else steps
