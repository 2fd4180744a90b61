"""A norm and the linear layers that read it, as one module: Transformer Engine's LayerNormLinear and LayerNormMLP."""

from lightning_fp8.modules.fused.layernorm_linear import LayerNormLinear
from lightning_fp8.modules.fused.layernorm_mlp import LayerNormMLP

__all__ = ["LayerNormLinear", "LayerNormMLP"]
