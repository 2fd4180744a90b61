"""Changing a module's class in place."""

from __future__ import annotations

from torch import nn


def unsharded_class(module: nn.Module) -> type:
    """The class of ``module`` before ``fully_shard`` put its mixin in front."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else type(module)


def retype(module: nn.Module, new: type) -> None:
    """Make ``module`` a ``new``, under the mixin of ``fully_shard`` if there is one."""
    cls = type(module)
    sharded = unsharded_class(module) is not cls
    module.__class__ = type(cls.__name__, (cls.__bases__[0], new), {}) if sharded else new
