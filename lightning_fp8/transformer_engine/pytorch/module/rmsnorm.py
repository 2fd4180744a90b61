"""``transformer_engine.pytorch.module.rmsnorm``."""

from lightning_fp8.modules.norm import RMSNorm

__all__ = ["RMSNorm"]
