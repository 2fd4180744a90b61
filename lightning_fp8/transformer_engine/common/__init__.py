"""``transformer_engine.common``: its module of recipes."""

from lightning_fp8.transformer_engine.common import recipe

__all__ = ["recipe"]
