"""Swapping a module's class in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_fp8.modules.conv1d import fp8_conv1d


def unsharded_class(module: nn.Module) -> type:
    """The class of ``module`` before ``fully_shard`` put its mixin in front."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else type(module)


def swap_class(module: nn.Module, new: type) -> None:
    """Make ``module`` a ``new``, under the mixin of ``fully_shard`` if there is one."""
    cls = type(module)
    sharded = unsharded_class(module) is not cls
    module.__class__ = type(cls.__name__, (cls.__bases__[0], new), {}) if sharded else new


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' own Conv1D, told without importing it."""
    cls = unsharded_class(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def swap_conv1d(module: nn.Module) -> None:
    """Turn transformers' Conv1D into its FP8 subclass, in place."""
    weight: Any = module.weight
    swap_class(module, fp8_conv1d(unsharded_class(module)))
    module.in_features, module.out_features = weight.shape  # type: ignore[assignment]
