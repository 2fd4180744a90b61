"""``transformer_engine.pytorch.module``."""

from lightning_fp8.foreign_names import answering
from lightning_fp8.modules.fused import LayerNormLinear, LayerNormMLP
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.transformer_engine.answers import MODULE

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]

__getattr__ = answering(__name__, MODULE.get)
