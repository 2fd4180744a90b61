"""``torchao.float8.float8_linear``: the class of converted layers."""

from lightning_fp8.modules.linear import Linear as Float8Linear

__all__ = ["Float8Linear"]
