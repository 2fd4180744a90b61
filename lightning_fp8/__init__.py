"""FP8 training for PyTorch Lightning, on any machine, with nothing to compile.

Names are imported on first use: ``lightning-fp8 doctor`` speaks before torch is imported, which takes seconds and may
fail, and tools start without Lightning. ``lightning_fp8.ops`` defines ``torch.ops.lightning_fp8``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fp8.version import __version__

if TYPE_CHECKING:
    from lightning_fp8.autocast import fp8_autocast
    from lightning_fp8.callbacks import FP8Callback
    from lightning_fp8.checkpoint.export import export_te_state_dict
    from lightning_fp8.checkpoint.load import load_te_state_dict
    from lightning_fp8.convert.conversion import convert_module
    from lightning_fp8.export.context import onnx_export
    from lightning_fp8.formats import Format
    from lightning_fp8.modules import (
        DotProductAttention,
        InferenceParams,
        LayerNorm,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        MultiheadAttention,
        RMSNorm,
        RotaryPositionEmbedding,
        TransformerLayer,
    )
    from lightning_fp8.modules.state import fp8_state_dict, load_fp8_state_dict
    from lightning_fp8.plugin.fabric import FP8FabricPrecision
    from lightning_fp8.plugin.precision import FP8Precision
    from lightning_fp8.recipes import (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Float8RowwiseScaling,
        MXFP8BlockScaling,
        make_recipe,
    )

_HOMES = {
    "DelayedScaling": "recipes",
    "DotProductAttention": "modules",
    "FP8Callback": "callbacks",
    "FP8FabricPrecision": "plugin.fabric",
    "FP8Precision": "plugin.precision",
    "Float8BlockScaling": "recipes",
    "Float8CurrentScaling": "recipes",
    "Float8RowwiseScaling": "recipes",
    "Format": "formats",
    "InferenceParams": "modules",
    "LayerNorm": "modules",
    "LayerNormLinear": "modules",
    "LayerNormMLP": "modules",
    "Linear": "modules",
    "MXFP8BlockScaling": "recipes",
    "MultiheadAttention": "modules",
    "RMSNorm": "modules",
    "RotaryPositionEmbedding": "modules",
    "TransformerLayer": "modules",
    "convert_module": "convert.conversion",
    "export_te_state_dict": "checkpoint.export",
    "fp8_autocast": "autocast",
    "fp8_state_dict": "modules.state",
    "load_fp8_state_dict": "modules.state",
    "load_te_state_dict": "checkpoint.load",
    "make_recipe": "recipes",
    "onnx_export": "export.context",
}
"""Where each public name lives."""

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "FP8Callback",
    "FP8FabricPrecision",
    "FP8Precision",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "__version__",
    "convert_module",
    "export_te_state_dict",
    "fp8_autocast",
    "fp8_state_dict",
    "load_fp8_state_dict",
    "load_te_state_dict",
    "make_recipe",
    "onnx_export",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
