"""DotProductAttention: its arguments and masks in Transformer Engine's words, in FP8 and in high precision."""

from lightning_fp8.attention.modules.dot_product import DotProductAttention

__all__ = ["DotProductAttention"]
