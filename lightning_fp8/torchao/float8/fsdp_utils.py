"""``torchao.float8.fsdp_utils``."""

from torch import nn

from lightning_fp8.arguments import require_module

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Does nothing, because FSDP2's gathers in FP8 already reduce the amaxes of all weights at once.

    Args:
        module: the sharded model.
    """
    require_module("precompute_float8_dynamic_scale_for_fsdp", module)
