"""FP8 training for PyTorch Lightning, on any machine, with nothing to compile."""

from lightning_fp8.autocast import fp8_autocast
from lightning_fp8.callbacks import FP8Callback
from lightning_fp8.checkpoint.export import export_te_state_dict
from lightning_fp8.checkpoint.load import load_te_state_dict
from lightning_fp8.convert import convert_module
from lightning_fp8.formats import Format
from lightning_fp8.modules import LayerNorm, Linear, RMSNorm
from lightning_fp8.precision import FP8FabricPrecision, FP8Precision
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
