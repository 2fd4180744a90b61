"""``torchao.float8.float8_tensor_parallel``: the styles of :mod:`lightning_fp8.sharding.styles`."""

from lightning_fp8.sharding.styles import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
