"""DotProductAttention with Transformer Engine's arguments and mask types, in FP8 and in high precision."""

from lightning_fp8.attention.modules.dot_product import DotProductAttention

__all__ = ["DotProductAttention"]
