"""``transformer_engine.pytorch.attention``."""

from lightning_fp8.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from lightning_fp8.transformer_engine.pytorch.attention.inference import InferenceParams
from lightning_fp8.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from lightning_fp8.transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]
