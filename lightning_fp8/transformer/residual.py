"""The residual connections of a TransformerLayer, with dropout and stochastic depth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8.attention.modules.packed import sequence_of


def add_branch(
    residual: Tensor, branch: Tensor, dropout: float, drop_path: float, qkv_format: str, cu_seqlens: Tensor | None
) -> Tensor:
    """``residual + branch`` in training, with dropout of elements and of whole samples of the branch.

    The values that are kept are divided by the probability to keep them. Source of ``drop_path``: Huang et al., *Deep
    Networks with Stochastic Depth*, arXiv:1603.09382.

    Args:
        residual, branch: ``[s, b, h]``, ``[b, s, h]`` or ``[t, h]``, according to ``qkv_format``.
        dropout: the probability that an element is dropped.
        drop_path: the probability that a sample (a sequence of the batch) is dropped.
        cu_seqlens: integers ``[b + 1]``, the starts of the sequences of ``"thd"``. Without it all rows are one sample.
    """
    branch = F.dropout(branch, dropout) if dropout else branch
    if drop_path:
        branch = branch * _kept(branch, drop_path, qkv_format, cu_seqlens)
    return residual + branch


def _kept(x: Tensor, drop_path: float, qkv_format: str, cu_seqlens: Tensor | None) -> Tensor:
    """For each sample, 0 or one over the probability to keep it; broadcastable to ``x``."""
    if qkv_format == "thd":
        samples = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    else:
        samples = x.shape[1 if qkv_format == "sbhd" else 0]
    kept = torch.empty(samples, dtype=x.dtype, device=x.device).bernoulli_(1 - drop_path)
    if drop_path < 1:
        kept = kept / (1 - drop_path)
    if qkv_format == "sbhd":
        return kept[:, None]
    if qkv_format == "bshd":
        return kept[:, None, None]
    if cu_seqlens is None:
        return kept[:, None]
    row = torch.arange(len(x), device=x.device)
    return kept[sequence_of(row, cu_seqlens.to(x.device))][:, None]
