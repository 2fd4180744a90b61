"""Norms of the heads of queries and keys, as Transformer Engine's ``qk_norm_type`` names them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.modules.norm import LayerNorm, RMSNorm
from lightning_fp8.te.keys import EXTRA_STATE


class L2Normalization(nn.Module):
    """``x / sqrt(sum(x²) + eps)`` over the last dimension, computed in float32 at least."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Drop the ``_extra_state`` of Transformer Engine's norm, which is always empty."""
        state_dict.pop(f"{prefix}{EXTRA_STATE}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., channels]`` to the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def head_norms(
    qk_norm_type: str | None, channels: int, eps: float, **factory: Any
) -> tuple[nn.Module, nn.Module] | tuple[None, None]:
    """The norm of the queries and the norm of the keys, each with its own parameters ``[channels]``.

    Both are None without a type. A norm without parameters is shared.
    """
    if qk_norm_type is None:
        return None, None
    if qk_norm_type == "L2Normalization":
        of_both = L2Normalization(eps)
        return of_both, of_both
    norm = RMSNorm if qk_norm_type == "RMSNorm" else LayerNorm
    return norm(channels, eps, **factory), norm(channels, eps, **factory)
