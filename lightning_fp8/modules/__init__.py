"""Modules with Transformer Engine's names and arguments, as subclasses of torch.nn's."""

from lightning_fp8.modules.attention import DotProductAttention
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.norm import LayerNorm, RMSNorm

__all__ = ["DotProductAttention", "LayerNorm", "Linear", "RMSNorm"]
