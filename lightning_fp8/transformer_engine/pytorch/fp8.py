"""``transformer_engine.pytorch.fp8``, the former name of ``quantization``."""

from lightning_fp8.foreign_names import answering
from lightning_fp8.formats import Format
from lightning_fp8.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from lightning_fp8.recipes import RecipeFields as Recipe
from lightning_fp8.transformer_engine.answers import STATE
from lightning_fp8.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "Recipe",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]

__getattr__ = answering(__name__, STATE.get)
