"""``transformer_engine.pytorch.transformer``."""

from lightning_fp8.transformer import TransformerLayer

__all__ = ["TransformerLayer"]
