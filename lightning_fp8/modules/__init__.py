"""Modules with Transformer Engine's names and arguments; those that torch.nn has, too, are its subclasses."""

from lightning_fp8.modules.attention import DotProductAttention
from lightning_fp8.modules.fused import LayerNormLinear, LayerNormMLP
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.modules.transformer import (
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
)

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
]
