"""The ops on the CPU, and on a card for which there is no kernel: the specification, in whichever format is given."""

from __future__ import annotations

from torch import Tensor

from lightning_fp8.ops.attention.casts import Codes, cast
from lightning_fp8.ops.attention.layouts import from_heads, pack_codes, to_heads, unpack_codes, unpack_rows
from lightning_fp8.ops.attention.masks import Lengths
from lightning_fp8.ops.attention.packed import pack
from lightning_fp8.ops.attention.reference import backward, forward
from lightning_fp8.ops.attention.schema import parse_attention_config
from lightning_fp8.ops.core.registration import implement


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    qkv_format, band, centered = parse_attention_config(config)
    q_heads, queries = to_heads(q, qkv_format, cu_seqlens_q)
    k_heads, keys = to_heads(k, qkv_format, cu_seqlens_kv)
    v_heads, _ = to_heads(v, qkv_format, cu_seqlens_kv)
    lengths = None if queries is None or keys is None else Lengths(queries, keys)
    q8, k8, v8 = cast(q_heads, False, queries), cast(k_heads, centered, keys), cast(v_heads, False, keys)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o, m, l = forward(q8, k8, v8, scale, band, lengths, q.dtype)  # noqa: E741
    if qkv_format == "thd" and cu_seqlens_q is not None and cu_seqlens_kv is not None:
        q8 = pack_codes(q8, cu_seqlens_q, len(q))
        k8, v8 = (pack_codes(codes, cu_seqlens_kv, len(k)) for codes in (k8, v8))
        m, l = (pack(statistic, cu_seqlens_q, len(q)) for statistic in (m, l))  # noqa: E741
    return from_heads(o, qkv_format, cu_seqlens_q, len(q)), m, l, *q8, *k8, *v8


def attention_backward(
    do: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    q8: Tensor,
    q_scale_inv: Tensor,
    k8: Tensor,
    k_scale_inv: Tensor,
    v8: Tensor,
    v_scale_inv: Tensor,
    config: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    qkv_format, band, _ = parse_attention_config(config)
    q, k, v = Codes(q8, q_scale_inv), Codes(k8, k_scale_inv), Codes(v8, v_scale_inv)
    do_heads, queries = to_heads(do, qkv_format, cu_seqlens_q)
    o_heads, _ = to_heads(o, qkv_format, cu_seqlens_q)
    lengths = None
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        lengths = Lengths(cu_seqlens_q[1:] - cu_seqlens_q[:-1], cu_seqlens_kv[1:] - cu_seqlens_kv[:-1])
        if qkv_format == "thd":
            q, k, v = unpack_codes(q, cu_seqlens_q), unpack_codes(k, cu_seqlens_kv), unpack_codes(v, cu_seqlens_kv)
            m, l = unpack_rows(m, cu_seqlens_q), unpack_rows(l, cu_seqlens_q)  # noqa: E741
    scale = q8.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    do8 = cast(do_heads, lengths=queries)
    dq, dk, dv = backward(do8, q, k, v, o_heads, m, l, scale, band, lengths, do.dtype)
    dq = from_heads(dq, qkv_format, cu_seqlens_q, len(q8))
    dk, dv = (from_heads(gradient, qkv_format, cu_seqlens_kv, len(k8)) for gradient in (dk, dv))
    return dq, dk, dv


for _op in (attention_forward, attention_backward):
    implement(_op.__name__, "cpu", _op)
