"""What the fused modules are told, checked, and the parameters that they begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import one_of, require_bool, require_number
from lightning_fp8.functions.norm import Norm
from lightning_fp8.scaling import FLOAT32_MAX


def checked_norm(normalization: str, eps: float, zero_centered_gamma: bool) -> Norm:
    """Raises:
    ValueError, TypeError: an unknown norm, or an ``eps`` or flag that does not fit.
    """
    one_of("normalization", normalization, ("LayerNorm", "RMSNorm"))
    require_number("eps", eps, largest=FLOAT32_MAX)
    require_bool("zero_centered_gamma", zero_centered_gamma)
    return Norm(float(eps), normalization == "RMSNorm", zero_centered_gamma)


def register_norm(module: nn.Module, norm: Norm, size: int, **factory: Any) -> None:
    """Register ``layer_norm_weight [size]`` and, for LayerNorm, ``layer_norm_bias [size]``."""
    module.layer_norm_weight = nn.Parameter(torch.empty(size, **factory))
    module.register_parameter("layer_norm_bias", None if norm.rms else nn.Parameter(torch.empty(size, **factory)))


def reset_norm(module: Any, norm: Norm) -> None:
    """Begin with the identity: gamma 1 and beta 0."""
    nn.init.constant_(module.layer_norm_weight, 0.0 if norm.zero_centered else 1.0)
    if module.layer_norm_bias is not None:
        nn.init.zeros_(module.layer_norm_bias)


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, without gradients where none are enabled: a function keeps and casts only what those need."""
    if torch.is_grad_enabled():
        return [*tensors]
    return [None if tensor is None else tensor.detach() for tensor in tensors]
