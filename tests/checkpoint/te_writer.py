"""Writes FP8 states as each Transformer Engine version does.

In a process of its own, because the recipe classes of 2.x must be pickled under their real module's name. A
specification is ``{"version", "parameters", "states", "attention"}``: parameters by key, the modules' columns
``(scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd)`` or None by name, and which of them are attention. What is
written is the state dict that the version would save.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSIONS = ("1.5", "1.6", "1.7", "1.8", "1.11", "1.12", "2.0", "2.18")
Columns = tuple[Tensor, Tensor, Tensor, Tensor]


def fake_recipes() -> types.ModuleType:
    module = types.ModuleType("transformer_engine.common.recipe")

    class _FormatHelper(NamedTuple):
        max_fwd: float
        max_bwd: float

    class Format(enum.Enum):
        E4M3 = _FormatHelper(448, 448)
        HYBRID = _FormatHelper(448, 57344)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: Format = Format.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: str = "max"
        scaling_factor_compute_algo: Any = None
        reduce_amax: bool = True
        fp8_dpa: bool = False
        fp8_mha: bool = False

    @dataclass
    class Float8CurrentScaling:
        fp8_format: Format = Format.HYBRID

    for cls in (_FormatHelper, Format, DelayedScaling, Float8CurrentScaling):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    for name in ("transformer_engine", "transformer_engine.common"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[module.__name__] = module
    return module


def version_1(columns: Columns | None, version: tuple[int, int], gemms: int) -> io.BytesIO:
    state: dict[str, Any] | None = None
    if columns is not None:
        names = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
        state = dict(zip(names, columns))
        state |= {"scale_inv_fwd": 1 / columns[0], "scale_inv_bwd": 1 / columns[2]}
        extra: dict[str, Any] = {"fp8_checkpoint": True, "num_gemms": gemms, "fp8_max_fwd": 448.0}
        extra["fp8_max_bwd"] = 57344.0
        if version <= (1, 5):
            state |= {"global_fp8_buffer": {"FWD_AMAX_0": [torch.rand(3)]}, "global_fp8_state": {"FP8_AUTOCAST": 7}}
            extra |= {"update_amax_and_scale_fwd": True, "global_fp8_buffer_pos_fwd_recompute": 3}
        elif version <= (1, 7):
            extra["buffer_index_and_autocast_key"] = [0, "FWD_AMAX_autocast", 0, "BWD_AMAX_autocast"]
        state["extra_fp8_variables"] = extra
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def version_2(columns: Columns | None, version: tuple[int, int], gemms: int, recipes: Any) -> Tensor:
    if columns is None and version >= (2, 4):
        return torch.empty(0, dtype=torch.uint8)
    state: dict[str, Any] | None = None
    if columns is not None:
        state = {"recipe": recipes.DelayedScaling(amax_history_len=len(columns[1]))}
        state |= dict(zip(("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"), columns))
        state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": gemms, "local_recipes": [state["recipe"]]}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def write(spec: dict[str, Any], recipes: Any) -> dict[str, Any]:
    version = tuple(int(part) for part in spec["version"].split("."))
    state_dict = dict(spec["parameters"])
    for name, columns in spec["states"].items():
        attention = name in spec["attention"]
        if attention and version <= (1, 5):
            continue  # attention kept no state then
        gemms = 1 if columns is None else len(columns[0]) // 3
        value = version_2(columns, version, gemms, recipes) if version[0] == 2 else version_1(columns, version, gemms)
        key = f"{name}.fused_attention" if attention and version in ((1, 6), (1, 7)) else name
        state_dict[f"{key}._extra_state"] = value
    return state_dict


def write_all(specs: list[dict[str, Any]], path: Path) -> None:
    """To be called in a process of its own, in which Transformer Engine seems to be installed from then on."""
    recipes = fake_recipes()
    torch.save([write(spec, recipes) for spec in specs], path)
