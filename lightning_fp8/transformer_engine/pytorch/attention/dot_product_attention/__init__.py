"""``transformer_engine.pytorch.attention.dot_product_attention``."""

from lightning_fp8.transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention,
)

__all__ = ["DotProductAttention"]
