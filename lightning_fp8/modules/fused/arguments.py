"""What the fused modules are told, checked, and the parameters that they begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.arguments import one_of, require_bool, require_number
from lightning_fp8.arguments.parallel import ParallelArguments, initialization_rng
from lightning_fp8.functions.norm import Norm
from lightning_fp8.scaling import FLOAT32_MAX

InitMethod = Callable[[Tensor], Any]
"""Fills a weight in place."""


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


def initialize(weight: Tensor, init_method: InitMethod | None, parallel: ParallelArguments) -> None:
    """Fill a weight; without ``init_method`` by Transformer Engine's, normal with deviation 0.023."""
    with torch.no_grad(), initialization_rng(parallel):
        if init_method is None:
            nn.init.normal_(weight, 0.0, 0.023)
        else:
            init_method(weight)


def detached(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, without gradients where none are enabled: a function keeps and casts only what those need."""
    if torch.is_grad_enabled():
        return [*tensors]
    return [None if tensor is None else tensor.detach() for tensor in tensors]
