"""``transformer_engine.pytorch.module``."""

from lightning_fp8.modules.fused import LayerNormLinear, LayerNormMLP
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
