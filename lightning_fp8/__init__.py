"""FP8 training for PyTorch Lightning, on any machine, with nothing to compile."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fp8.autocast import fp8_autocast
from lightning_fp8.checkpoint.export import export_te_state_dict
from lightning_fp8.checkpoint.load import load_te_state_dict
from lightning_fp8.convert import convert_module
from lightning_fp8.formats import Format
from lightning_fp8.modules import LayerNorm, Linear, RMSNorm
from lightning_fp8.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    make_recipe,
)
from lightning_fp8.state import fp8_state_dict, load_fp8_state_dict
from lightning_fp8.version import __version__

if TYPE_CHECKING:
    from lightning_fp8.callbacks import FP8Callback
    from lightning_fp8.precision import FP8FabricPrecision, FP8Precision

__all__ = [
    "DelayedScaling",
    "FP8Callback",
    "FP8FabricPrecision",
    "FP8Precision",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "LayerNorm",
    "Linear",
    "MXFP8BlockScaling",
    "RMSNorm",
    "__version__",
    "convert_module",
    "export_te_state_dict",
    "fp8_autocast",
    "fp8_state_dict",
    "load_fp8_state_dict",
    "load_te_state_dict",
    "make_recipe",
]

_NEEDS_LIGHTNING = {
    "FP8Callback": "lightning_fp8.callbacks",
    "FP8FabricPrecision": "lightning_fp8.precision",
    "FP8Precision": "lightning_fp8.precision",
}
"""Names whose modules import Lightning, which takes seconds: loaded on first use, so that tools start without it."""


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_LIGHTNING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_NEEDS_LIGHTNING[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
