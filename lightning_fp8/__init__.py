"""FP8 training for PyTorch Lightning, on any machine, without a build step.

Names are imported on first use: ``lightning-fp8 doctor`` prints its first lines before torch is imported, which takes
seconds and may fail, and tools start without Lightning. ``lightning_fp8.ops`` defines ``torch.ops.lightning_fp8``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fp8.version import __version__

if TYPE_CHECKING:
    from lightning_fp8.attention.context_parallel import get_batch_on_this_cp_rank
    from lightning_fp8.attention.modules import DotProductAttention
    from lightning_fp8.convert.conversion import convert_module
    from lightning_fp8.convert.first_step import conversion_summary
    from lightning_fp8.export.context import onnx_export
    from lightning_fp8.fp8_region import autocast, fp8_autocast
    from lightning_fp8.hf_trainer import FP8TrainerCallback as FP8TrainerCallback
    from lightning_fp8.modules.fused import LayerNormLinear, LayerNormMLP
    from lightning_fp8.modules.linear import Linear
    from lightning_fp8.modules.norm import LayerNorm, RMSNorm
    from lightning_fp8.modules.state import (
        FP8State,
        fp8_state_dict,
        load_fp8_state_dict,
        reset_fp8_scales,
        update_fp8_scales,
    )
    from lightning_fp8.monitor.callback import FP8Monitor
    from lightning_fp8.numerics.formats import Format
    from lightning_fp8.numerics.recipes import (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Float8RowwiseScaling,
        MXFP8BlockScaling,
        make_recipe,
    )
    from lightning_fp8.parallel.checkpoint import checkpoint
    from lightning_fp8.plugin.callback import FP8Callback
    from lightning_fp8.plugin.fabric import FP8FabricPrecision
    from lightning_fp8.plugin.precision import FP8Precision
    from lightning_fp8.te_checkpoints.export import export_te_state_dict
    from lightning_fp8.te_checkpoints.load import load_te_state_dict
    from lightning_fp8.transformer import (
        InferenceParams,
        MultiheadAttention,
        RotaryPositionEmbedding,
        TransformerLayer,
    )
    from lightning_fp8.weights.masters import with_master_weights
    from lightning_fp8.weights.model_init import fp8_model_init

_HOMES = {
    "DelayedScaling": "numerics.recipes",
    "DotProductAttention": "attention.modules",
    "FP8Callback": "plugin.callback",
    "FP8FabricPrecision": "plugin.fabric",
    "FP8Monitor": "monitor.callback",
    "FP8Precision": "plugin.precision",
    "FP8State": "modules.state",
    "FP8TrainerCallback": "hf_trainer",
    "Float8BlockScaling": "numerics.recipes",
    "Float8CurrentScaling": "numerics.recipes",
    "Float8RowwiseScaling": "numerics.recipes",
    "Format": "numerics.formats",
    "InferenceParams": "transformer",
    "LayerNorm": "modules.norm",
    "LayerNormLinear": "modules.fused",
    "LayerNormMLP": "modules.fused",
    "Linear": "modules.linear",
    "MXFP8BlockScaling": "numerics.recipes",
    "MultiheadAttention": "transformer",
    "RMSNorm": "modules.norm",
    "RotaryPositionEmbedding": "transformer",
    "TransformerLayer": "transformer",
    "autocast": "fp8_region",
    "checkpoint": "parallel.checkpoint",
    "conversion_summary": "convert.first_step",
    "convert_module": "convert.conversion",
    "export_te_state_dict": "te_checkpoints.export",
    "fp8_autocast": "fp8_region",
    "fp8_model_init": "weights.model_init",
    "fp8_state_dict": "modules.state",
    "get_batch_on_this_cp_rank": "attention.context_parallel",
    "load_fp8_state_dict": "modules.state",
    "update_fp8_scales": "modules.state",
    "reset_fp8_scales": "modules.state",
    "load_te_state_dict": "te_checkpoints.load",
    "make_recipe": "numerics.recipes",
    "onnx_export": "export.context",
    "with_master_weights": "weights.masters",
}
"""The module of each public name. ``__all__`` has those that import no package that may be missing."""

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "FP8Callback",
    "FP8FabricPrecision",
    "FP8Monitor",
    "FP8Precision",
    "FP8State",
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
    "autocast",
    "checkpoint",
    "conversion_summary",
    "convert_module",
    "export_te_state_dict",
    "fp8_autocast",
    "fp8_model_init",
    "fp8_state_dict",
    "get_batch_on_this_cp_rank",
    "load_fp8_state_dict",
    "load_te_state_dict",
    "make_recipe",
    "onnx_export",
    "reset_fp8_scales",
    "update_fp8_scales",
    "with_master_weights",
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
    return sorted({*globals(), *_HOMES})
