"""``transformer_engine.pytorch.attention``."""

from lightning_fp8.attention.modules import DotProductAttention
from lightning_fp8.foreign_names import answering
from lightning_fp8.modules.transformer import InferenceParams, MultiheadAttention, RotaryPositionEmbedding
from lightning_fp8.transformer_engine.answers import ATTENTION
from lightning_fp8.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]

__getattr__ = answering(__name__, ATTENTION.get)
