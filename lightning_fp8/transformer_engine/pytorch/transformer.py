"""``transformer_engine.pytorch.transformer``."""

from lightning_fp8.modules.transformer import TransformerLayer

__all__ = ["TransformerLayer"]
