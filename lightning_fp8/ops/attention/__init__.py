"""FP8 attention, forward and backward: two ops, and their specification in plain torch.

The specification states the numerics for heads side by side, ``[B, H, L, D]``:

    q8, k8, v8 = cast(q), cast(k, centered=True, mean_rows=rows_of_mean(band)), cast(v)
    o, m, l = forward(q8, k8, v8, softmax_scale, band)
    dq, dk, dv = backward(cast(do), q8, k8, v8, o, m, l, softmax_scale, band)

The ops take the formats of Transformer Engine, and casts are part of them: what a card needs beside the codes
(transposed copies, statistics) never leaves them. See :mod:`lightning_fp8.ops.attention.schema`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.attention import cpu as _cpu  # noqa: F401  (registers the implementation)
from lightning_fp8.ops.attention import cuda as _cuda  # noqa: F401  (registers the kernels)
from lightning_fp8.ops.attention.casts import BLOCK, Codes, cast, rows_of_mean
from lightning_fp8.ops.attention.launches import missing_kernel
from lightning_fp8.ops.attention.layouts import pack, unpack
from lightning_fp8.ops.attention.masks import Band, Lengths
from lightning_fp8.ops.attention.reference import backward, forward
from lightning_fp8.ops.attention.schema import (
    FORMATS,
    AttentionCall,
    Gradients,
    Kept,
    format_attention_options,
    parse_attention_options,
)
from lightning_fp8.ops.attention.tiles import KEYS, QUERIES
from lightning_fp8.ops.core.registration import op

__all__ = [
    "BLOCK",
    "FORMATS",
    "KEYS",
    "QUERIES",
    "AttentionCall",
    "Band",
    "Codes",
    "Gradients",
    "Kept",
    "Lengths",
    "attention_backward",
    "attention_forward",
    "attention_tables",
    "backward",
    "cast",
    "format_attention_options",
    "forward",
    "missing_kernel",
    "pack",
    "parse_attention_options",
    "rows_of_mean",
    "unpack",
]

_attention_forward = op("attention_forward")
_attention_tables = op("attention_tables")
_attention_backward = op("attention_backward")


def attention_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """``softmax(c q kᵀ) v`` of tensors in high precision, cast to FP8 on the way.

    Args:
        q, k, v: bfloat16, float16 or float32, in the format that ``call.options_text`` says; see
            :mod:`lightning_fp8.ops.attention.schema`.

    Returns:
        ``o`` in q's dtype and format, and what :func:`attention_backward` takes.

    Raises:
        ValueError: heads, lengths or ``cu_seqlens`` that do not fit.
    """
    o, *kept = _attention_forward(q, k, v, *call)
    return o, Kept(*kept)


def attention_tables(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, options_text: str, query_rows: int, key_rows: int, device: torch.device
) -> Tensor:
    """What a card reads of a batch's lengths in both passes: made once, it serves all calls with these arguments.

    Args:
        options_text: what :func:`format_attention_options` makes.
        query_rows, key_rows: L of queries and of keys, T of ``thd``.
        device: of the queries.

    Returns:
        int32, for :attr:`AttentionCall.tables`. It does not follow later changes of ``cu_seqlens``.
    """
    tables: Tensor = _attention_tables(cu_seqlens_q, cu_seqlens_kv, options_text, query_rows, key_rows, device)
    return tables


def attention_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    """The gradients of q, k and v in ``do``'s dtype.

    Args:
        do: the gradient of ``o``.
        o: what the forward op gave; BF16 is enough, and what it is rounded to.
        kept, call: as there.
        key_rows: L of keys and values, T of ``thd``.
    """
    return _attention_backward(do, o, *kept, key_rows, *call)
