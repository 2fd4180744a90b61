"""``transformer_engine.pytorch.attention.inference``."""

from lightning_fp8.modules.transformer import InferenceParams

__all__ = ["InferenceParams"]
