"""``torchao.float8``: one call after which a model's linear layers train in FP8.

Configurations are torchao's. Options that are not supported raise an error that says what to do instead. Numerics are
those of the recipes ``tensorwise`` and ``rowwise``.
"""

from lightning_fp8.foreign_names import add_absent_modules, answering
from lightning_fp8.torchao.answers import MODULES, NAMES
from lightning_fp8.torchao.float8 import config, float8_linear, float8_linear_utils, fsdp_utils
from lightning_fp8.torchao.float8.config import *  # noqa: F403
from lightning_fp8.torchao.float8.float8_linear_utils import convert_to_float8_training
from lightning_fp8.torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "config",
    "convert_to_float8_training",
    "float8_linear",
    "float8_linear_utils",
    "fsdp_utils",
    "precompute_float8_dynamic_scale_for_fsdp",
    *config.__all__,
]

__getattr__ = answering(__name__, NAMES.get)

for _module in config, float8_linear, float8_linear_utils, fsdp_utils:
    vars(_module)["__getattr__"] = answering(_module.__name__, NAMES.get)

add_absent_modules(__name__, MODULES)
