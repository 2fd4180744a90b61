"""``transformer_engine.pytorch.distributed``."""

from lightning_fp8.parallel.checkpoint import checkpoint

__all__ = ["checkpoint"]
