"""FP8 attention, forward and backward: two ops, and their specification in plain torch.

The specification states the numerics for heads side by side, ``[B, H, L, D]``:

    q8, k8, v8 = cast(q), cast(k, centered=True), cast(v)
    o, m, l = forward(q8, k8, v8, softmax_scale, causal)
    dq, dk, dv = backward(cast(do), q8, k8, v8, o, m, l, softmax_scale, causal)

The ops take the formats of Transformer Engine, and casts are part of them: what a card needs beside the codes
(transposed copies, statistics) never leaves them. See :mod:`lightning_fp8.ops.attention.schema`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.ops.attention import cpu as _cpu  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.attention import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.attention.casts import BLOCK, Codes, cast
from lightning_fp8.ops.attention.masks import Band, Lengths
from lightning_fp8.ops.attention.packed import pack, unpack
from lightning_fp8.ops.attention.reference import backward, forward
from lightning_fp8.ops.attention.schema import FORMATS, attention_config, parse_attention_config
from lightning_fp8.ops.attention.tiles import KEYS, QUERIES

__all__ = [
    "BLOCK",
    "FORMATS",
    "KEYS",
    "QUERIES",
    "Band",
    "Codes",
    "Kept",
    "Lengths",
    "attention_backward",
    "attention_config",
    "attention_forward",
    "backward",
    "cast",
    "forward",
    "pack",
    "parse_attention_config",
    "unpack",
]

_ops = torch.ops.lightning_fp8


class Kept(NamedTuple):
    """What the backward pass needs beside the output: rows' statistics, codes and scales; shapes are the ops' own."""

    m: Tensor
    l: Tensor  # noqa: E741
    q8: Tensor
    q_scale_inv: Tensor
    k8: Tensor
    k_scale_inv: Tensor
    v8: Tensor
    v_scale_inv: Tensor


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """``softmax(c q kᵀ) v`` of tensors in high precision, cast to FP8 on the way.

    Args:
        q, k, v: bfloat16, float16 or float32, in the format that ``config`` says; see
            :mod:`lightning_fp8.ops.attention.schema`.
        config: what :func:`attention_config` makes.
        softmax_scale: ``c``; None is ``1 / sqrt(D)``.
        cu_seqlens_q, cu_seqlens_kv: both or neither; needed for ``thd``.

    Returns:
        ``o`` in q's dtype and format, and what :func:`attention_backward` takes.

    Raises:
        ValueError: heads, lengths or ``cu_seqlens`` that do not fit.
    """
    o, *kept = _ops.attention_forward.default(q, k, v, config, softmax_scale, cu_seqlens_q, cu_seqlens_kv)
    return o, Kept(*kept)


def attention_backward(
    do: Tensor,
    o: Tensor,
    kept: Kept,
    config: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in ``do``'s dtype.

    Args:
        do: the gradient of ``o``.
        o: what the forward op gave; BF16 is enough, and what it is rounded to.
        kept, config, softmax_scale, cu_seqlens_q, cu_seqlens_kv: as there.
    """
    return _ops.attention_backward.default(do, o, *kept, config, softmax_scale, cu_seqlens_q, cu_seqlens_kv)
