"""``transformer_engine.pytorch.attention.multi_head_attention``."""

from lightning_fp8.transformer import MultiheadAttention

__all__ = ["MultiheadAttention"]
