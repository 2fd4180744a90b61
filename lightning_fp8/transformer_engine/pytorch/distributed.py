"""``transformer_engine.pytorch.distributed``."""

from lightning_fp8.foreign_names import answering
from lightning_fp8.parallel.checkpoint import checkpoint
from lightning_fp8.transformer_engine.answers import DISTRIBUTED

__all__ = ["checkpoint"]

__getattr__ = answering(__name__, DISTRIBUTED.get)
