"""``torchao.float8.float8_linear``: the class of converted layers."""

from lightning_fp8.foreign_names import answering
from lightning_fp8.modules.linear import Linear as Float8Linear
from lightning_fp8.torchao.answers import NAMES

__all__ = ["Float8Linear"]

__getattr__ = answering(__name__, NAMES.get)
