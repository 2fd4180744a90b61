"""``transformer_engine.pytorch.attention``."""

from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.transformer import InferenceParams, MultiheadAttention
from lightning_fp8.transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]
