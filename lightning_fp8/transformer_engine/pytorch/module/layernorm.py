"""``transformer_engine.pytorch.module.layernorm``."""

from lightning_fp8.modules.norm import LayerNorm

__all__ = ["LayerNorm"]
