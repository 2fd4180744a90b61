"""``transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention``."""

from lightning_fp8.attention.modules import DotProductAttention

__all__ = ["DotProductAttention"]
