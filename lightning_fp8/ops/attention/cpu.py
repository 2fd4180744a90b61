"""The ops on the CPU, and on a card for which there is no kernel: the specification, in whichever format is given."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.attention.casts import cast, rows_of_mean
from lightning_fp8.ops.attention.layouts import Packing, from_heads, to_heads
from lightning_fp8.ops.attention.masks import Lengths
from lightning_fp8.ops.attention.reference import backward, forward
from lightning_fp8.ops.attention.schema import (
    AttentionCall,
    Gradients,
    Kept,
    implement_attention,
    parse_attention_options,
)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    qkv_format, band, centered, _ = parse_attention_options(call.options_text)
    q_heads, q_lengths = to_heads(q, qkv_format, call.cu_seqlens_q)
    k_heads, k_lengths = to_heads(k, qkv_format, call.cu_seqlens_kv)
    v_heads, _ = to_heads(v, qkv_format, call.cu_seqlens_kv)
    lengths = None if q_lengths is None or k_lengths is None else Lengths(q_lengths, k_lengths)
    q8, v8 = cast(q_heads, False, q_lengths), cast(v_heads, False, k_lengths)
    k8 = cast(k_heads, centered, k_lengths, rows_of_mean(band))
    o, m, l = forward(q8, k8, v8, call.softmax_scale_of(q.shape[-1]), band, lengths, q.dtype)  # noqa: E741
    of_queries = Packing.of(q, qkv_format, call.cu_seqlens_q)
    of_keys = Packing.of(k, qkv_format, call.cu_seqlens_kv)
    codes = of_queries.pack_codes(q8), of_keys.pack_codes(k8), of_keys.pack_codes(v8)
    kept = Kept(of_queries.pack(m, -torch.inf), of_queries.pack(l), *(tensor for pair in codes for tensor in pair))
    return from_heads(o, qkv_format, call.cu_seqlens_q, len(q)), kept


def attention_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    qkv_format, band, *_ = parse_attention_options(call.options_text)
    do_heads, q_lengths = to_heads(do, qkv_format, call.cu_seqlens_q)
    o_heads, _ = to_heads(o, qkv_format, call.cu_seqlens_q)
    lengths = None
    if q_lengths is not None and call.cu_seqlens_kv is not None:
        lengths = Lengths(q_lengths, call.cu_seqlens_kv.diff())
    of_queries = Packing.of(do, qkv_format, call.cu_seqlens_q)
    of_keys = Packing.of(do, qkv_format, call.cu_seqlens_kv, key_rows)
    q8 = of_queries.unpack_codes(kept.q8, kept.q_scale_inv)
    k8, v8 = of_keys.unpack_codes(kept.k8, kept.k_scale_inv), of_keys.unpack_codes(kept.v8, kept.v_scale_inv)
    m, l = of_queries.unpack(kept.m, -torch.inf), of_queries.unpack(kept.l)  # noqa: E741
    softmax_scale = call.softmax_scale_of(do.shape[-1])
    do8 = cast(do_heads, lengths=q_lengths)
    dq, dk, dv = backward(do8, q8, k8, v8, o_heads, m, l, softmax_scale, band, lengths, do.dtype)
    dq = from_heads(dq, qkv_format, call.cu_seqlens_q, len(do))
    dk, dv = (from_heads(gradient, qkv_format, call.cu_seqlens_kv, key_rows) for gradient in (dk, dv))
    return dq, dk, dv


implement_attention("cpu", attention_forward, attention_backward)
