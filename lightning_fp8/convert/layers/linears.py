"""Linear layers of a model, converted or not, and their matrices."""

from __future__ import annotations

from torch import nn

from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.swap import is_conv1d
from lightning_fp8.names import clean_name


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer, converted or not."""
    return isinstance(module, (nn.Linear, LinearLayer)) or is_conv1d(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """``(out_features, in_features)`` of a linear layer."""
    if is_conv1d(module):
        in_features, out_features = module.weight.shape  # type: ignore[union-attr, misc]
        return out_features, in_features
    return module.out_features, module.in_features  # type: ignore[return-value]


def matrices_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` of each GEMM of a linear layer by its name, which is empty where it has one."""
    return module.matrices if isinstance(module, LinearLayer) else {"": features_of(module)}


def linear_names(module: nn.Module) -> list[str]:
    """The names of the linear layers in ``module``, in registration order."""
    return [clean_name(name) for name, child in module.named_modules() if is_linear(child)]
