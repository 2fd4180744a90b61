"""Attention with keys and values that are FP8 codes already, as gathered by context parallelism, and the cast to codes.

The op casts queries. The backward pass is :func:`~lightning_fp8.attention.ops.attention.attention_backward`, which
takes codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops.attention import AttentionCall
from lightning_fp8.attention.ops.casts import cast
from lightning_fp8.attention.ops.layouts import Packing, from_heads, row_space, to_heads
from lightning_fp8.attention.ops.reference import forward
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.ops.op import op


class QueriesKept(NamedTuple):
    """What the backward pass needs of queries: the first fields of :class:`~lightning_fp8.attention.ops.Kept`."""

    m: Tensor
    l: Tensor  # noqa: E741
    q8: Tensor
    q_scale_inv: Tensor


@op("attention_cast")
def attention_cast_op(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast keys or values ``[B, L, H, D]`` to codes in blocks of a head and 128 rows.

    Returns:
        E4M3 ``[H, R, D]`` and float32 ``[H, R / 128]``, in packed rows: see :class:`~lightning_fp8.attention.ops.Kept`.
    """
    space, (heads, channels) = row_space(x, "bshd", None), x.shape[-2:]
    codes = x.new_empty((heads, space.total, channels), dtype=E4M3.dtype)
    return codes, x.new_empty((heads, space.blocks), dtype=torch.float32)


@op("attention_forward_of_codes")
def attention_forward_of_codes_op(
    q: Tensor, k8: Tensor, k_scale_inv: Tensor, v8: Tensor, v_scale_inv: Tensor, key_rows: int, call: AttentionCall
) -> tuple[Tensor, QueriesKept]:
    """``softmax(c q kᵀ) v`` of high-precision queries and the codes of keys and values.

    Args:
        q: bfloat16, float16 or float32 ``[B, L, H, D]``.
        k8, k_scale_inv, v8, v_scale_inv: results of :func:`attention_cast`.
        key_rows: L of keys and values.
        call: the call's options. Its format must be ``bshd``, without ``cu_seqlens``; ``centered`` is ignored.

    Returns:
        ``o`` in q's dtype, and what the backward op needs of queries.
    """
    space, (heads, channels) = row_space(q, "bshd", None), q.shape[-2:]
    m, l = (q.new_empty((heads, space.total), dtype=torch.float32) for _ in range(2))  # noqa: E741
    codes = q.new_empty((heads, space.total, channels), dtype=E4M3.dtype)
    q_scale_inv = q.new_empty((heads, space.blocks), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v8.shape[-1])), QueriesKept(m, l, codes, q_scale_inv)


attention_cast: Callable[[Tensor], tuple[Tensor, Tensor]] = attention_cast_op.call
attention_forward_of_codes: Callable[..., tuple[Tensor, QueriesKept]] = attention_forward_of_codes_op.call


def reference_attention_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`~lightning_fp8.attention.ops.casts.cast`, in packed rows."""
    heads, _ = to_heads(x, "bshd", None)
    return tuple(Packing(x, "bshd", None).pack_codes(cast(heads)))  # type: ignore[return-value]


def reference_attention_forward_of_codes(
    q: Tensor, k8: Tensor, k_scale_inv: Tensor, v8: Tensor, v_scale_inv: Tensor, key_rows: int, call: AttentionCall
) -> tuple[Tensor, QueriesKept]:
    """:func:`~lightning_fp8.attention.ops.reference.forward`, from and to packed rows."""
    of_queries = Packing(q, "bshd", None)
    of_keys = Packing(q, "bshd", None, key_rows)
    q8 = cast(to_heads(q, "bshd", None)[0])
    keys, values = of_keys.unpack_codes(k8, k_scale_inv), of_keys.unpack_codes(v8, v_scale_inv)
    softmax_scale, band = call.softmax_scale_of(q.shape[-1]), call.attention.band
    o, m, l = forward(q8, keys, values, softmax_scale, band, None, q.dtype)  # noqa: E741
    kept = QueriesKept(of_queries.pack(m, -torch.inf), of_queries.pack(l), *of_queries.pack_codes(q8))
    return from_heads(o, "bshd", None), kept


attention_cast_op.implement("cpu", reference_attention_cast)
attention_forward_of_codes_op.implement("cpu", reference_attention_forward_of_codes)
