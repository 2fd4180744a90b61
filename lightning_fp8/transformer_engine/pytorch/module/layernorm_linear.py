"""``transformer_engine.pytorch.module.layernorm_linear``."""

from lightning_fp8.modules.fused import LayerNormLinear

__all__ = ["LayerNormLinear"]
