"""``transformer_engine.pytorch.module``."""

from lightning_fp8.transformer_engine.pytorch.module.layernorm import LayerNorm
from lightning_fp8.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from lightning_fp8.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from lightning_fp8.transformer_engine.pytorch.module.linear import Linear
from lightning_fp8.transformer_engine.pytorch.module.rmsnorm import RMSNorm

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]
