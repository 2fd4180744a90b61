"""``transformer_engine.pytorch.module.linear``."""

from lightning_fp8.modules.linear import Linear

__all__ = ["Linear"]
