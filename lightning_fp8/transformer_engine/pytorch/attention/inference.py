"""``transformer_engine.pytorch.attention.inference``."""

from lightning_fp8.transformer import InferenceParams

__all__ = ["InferenceParams"]
