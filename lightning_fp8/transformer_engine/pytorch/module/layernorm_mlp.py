"""``transformer_engine.pytorch.module.layernorm_mlp``."""

from lightning_fp8.modules.fused import LayerNormMLP

__all__ = ["LayerNormMLP"]
