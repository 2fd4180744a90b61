"""``transformer_engine.common.recipe``: recipes, their base class, and the formats.

For arguments of recipes that exist only in Transformer Engine, see :mod:`lightning_fp8.numerics.recipe_arguments`.
"""

from lightning_fp8.foreign_names import answering
from lightning_fp8.numerics.formats import Format
from lightning_fp8.numerics.recipe_arguments import MMParams
from lightning_fp8.numerics.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from lightning_fp8.numerics.recipes import RecipeFields as Recipe
from lightning_fp8.transformer_engine.answers import RECIPE

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "Recipe",
]

__getattr__ = answering(__name__, RECIPE.get)
