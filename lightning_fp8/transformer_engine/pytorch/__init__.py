"""``transformer_engine.pytorch``: modules, regions, weights in FP8, checkpointing and export."""

import sys

from lightning_fp8.foreign_names import add_absent_modules, add_module, answer_all, answering
from lightning_fp8.transformer_engine.answers import ABSENT_MODULES, NAMES, PYTORCH
from lightning_fp8.transformer_engine.pytorch import (
    attention,
    distributed,
    export,
    fp8,
    graph,
    module,
    quantization,
    transformer,
)
from lightning_fp8.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from lightning_fp8.transformer_engine.pytorch.distributed import checkpoint
from lightning_fp8.transformer_engine.pytorch.export import onnx_export
from lightning_fp8.transformer_engine.pytorch.graph import make_graphed_callables
from lightning_fp8.transformer_engine.pytorch.module import *  # noqa: F403
from lightning_fp8.transformer_engine.pytorch.quantization import *  # noqa: F403
from lightning_fp8.transformer_engine.pytorch.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "attention",
    "checkpoint",
    "distributed",
    "export",
    "fp8",
    "graph",
    "make_graphed_callables",
    "module",
    "onnx_export",
    "quantization",
    "transformer",
    *module.__all__,
    *quantization.__all__,
]

__getattr__ = answering(__name__, PYTORCH.get)

_FILES = {
    "attention.dot_product_attention": DotProductAttention,
    "attention.dot_product_attention.dot_product_attention": DotProductAttention,
    "attention.inference": InferenceParams,
    "attention.multi_head_attention": MultiheadAttention,
    "module.layernorm": module.LayerNorm,
    "module.layernorm_linear": module.LayerNormLinear,
    "module.layernorm_mlp": module.LayerNormMLP,
    "module.linear": module.Linear,
    "module.rmsnorm": module.RMSNorm,
}
"""Transformer Engine's files of one class; a package is before its files."""

for _path, _class in _FILES.items():
    add_module(f"{__name__}.{_path}", f"``transformer_engine.pytorch.{_path}``.", **{_class.__name__: _class})

for _path, _module in [*sys.modules.items()]:
    if _path.startswith(f"{__name__}."):
        _here = f"{_path.removeprefix(f'{__name__}.')} has {', '.join(_module.__all__)}"
        answer_all(_module, f"{_here}; other names are internal to Transformer Engine, leave them out", NAMES)

add_absent_modules(__name__, ABSENT_MODULES, NAMES)
