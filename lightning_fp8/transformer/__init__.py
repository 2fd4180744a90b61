"""MultiheadAttention and TransformerLayer, rotary position embeddings, and a cache of keys for generation."""

from lightning_fp8.transformer.arguments import AttentionArguments
from lightning_fp8.transformer.inference import InferenceParams
from lightning_fp8.transformer.multihead_attention import MultiheadAttention
from lightning_fp8.transformer.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from lightning_fp8.transformer.transformer_layer import TransformerLayer

__all__ = [
    "AttentionArguments",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
