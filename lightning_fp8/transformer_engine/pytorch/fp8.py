"""``transformer_engine.pytorch.fp8``, the former name of ``quantization``."""

from lightning_fp8.numerics.formats import Format
from lightning_fp8.numerics.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from lightning_fp8.numerics.recipes import RecipeFields as Recipe
from lightning_fp8.transformer_engine.pytorch import quantization
from lightning_fp8.transformer_engine.pytorch.quantization import *  # noqa: F403

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "Recipe",
    *quantization.__all__,
]
