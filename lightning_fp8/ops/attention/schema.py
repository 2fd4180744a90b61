"""The schemas of attention's ops, and their shapes on fake and meta tensors.

Queries, keys, values and gradients come in one of Transformer Engine's formats, any strides: ``bshd [B, L, H, D]``,
``sbhd [L, B, H, D]``, or ``thd [T, H, D]``, sequences one after the other. Outputs and gradients are contiguous in the
same format. ``cu_seqlens``, integers ``[B + 1]``, says where each sequence of ``thd`` starts, and rows behind the last
one are padding; with the other formats its differences are lengths, and the rows after them padding.

``softmax_scale`` is ``c`` of ``softmax(c q kᵀ)``; None is ``1 / sqrt(D)``.

What the forward op gives beside ``o`` is for the backward op alone: codes ``[B, H, L, D]``, float32 ``scale_inv
[B, H, ceil(L / 128)]``, ``m`` and ``l`` ``[B, H, L]``; of ``thd`` codes ``[T, H, D]``, ``m`` and ``l`` ``[T, H]``, and
``scale_inv [T // 128 + B, H]``, in which the blocks of sequence ``b`` start at row ``cu_seqlens[b] // 128 + b``: room
for every choice of lengths, which no host has to know.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fp8.formats import E4M3
from lightning_fp8.ops.attention.casts import BLOCK
from lightning_fp8.ops.attention.masks import Band
from lightning_fp8.ops.core.config import parse_options
from lightning_fp8.ops.core.registration import define, fake, refuse_vmap

FORMATS = ("sbhd", "bshd", "thd")

_OPTIONS = "str config, float? softmax_scale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None"
_KEPT = (
    "Tensor m, Tensor l, Tensor q8, Tensor q_scale_inv, Tensor k8, Tensor k_scale_inv, Tensor v8, Tensor v_scale_inv"
)

define("attention_forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor o, {_KEPT})")
define("attention_backward", f"(Tensor do, Tensor o, {_KEPT}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)")
refuse_vmap("attention_forward", "attention_backward")


class AttentionConfig(NamedTuple):
    """What the string says: ``"bshd left=64 right=0 bottom_right centered"``.

    Attributes:
        qkv_format: one of :data:`FORMATS`.
        band: which keys a query sees.
        centered: keys are cast without their mean.
    """

    qkv_format: str
    band: Band
    centered: bool


def attention_config(qkv_format: str, band: Band | None = None, centered: bool = True) -> str:
    """The string for a call; the softmax scale is no part of it, a number that torch.compile may let vary."""
    words = [qkv_format]
    if band is not None:
        words += [] if band.left is None else [f"left={band.left}"]
        words += [] if band.right is None else [f"right={band.right}"]
        words += ["bottom_right"] if band.bottom_right else []
    return " ".join([*words, "centered"] if centered else words)


@lru_cache(maxsize=1024)
def parse_attention_config(text: str) -> AttentionConfig:
    """What ``text`` says.

    Raises:
        ValueError: it names another format first, or says a word that is none of :class:`AttentionConfig`'s.
    """
    qkv_format, _, words = text.partition(" ")
    if qkv_format not in FORMATS:
        raise ValueError(f"config={text!r} names the format {qkv_format!r}; use one of {', '.join(FORMATS)}")
    said = parse_options(words, ("left", "right", "bottom_right", "centered"))
    left, right = (int(said[side]) if side in said else None for side in ("left", "right"))
    return AttentionConfig(qkv_format, Band(left, right, "bottom_right" in said), "centered" in said)


def _sizes(x: Tensor, qkv_format: str) -> tuple[int, int, int, int]:
    """Batch, heads, rows and channels of a padded tensor."""
    first, second, heads, channels = x.shape
    return (first, heads, second, channels) if qkv_format == "bshd" else (second, heads, first, channels)


def _fake_codes(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if qkv_format == "thd":
        assert cu_seqlens is not None
        rows, heads, _ = x.shape
        shape, blocks = tuple(x.shape), (rows // BLOCK + cu_seqlens.shape[0] - 1, heads)
    else:
        batch, heads, rows, channels = _sizes(x, qkv_format)
        shape, blocks = (batch, heads, rows, channels), (batch, heads, -(-rows // BLOCK))  # type: ignore[assignment]
    return x.new_empty(shape, dtype=E4M3.dtype), x.new_empty(blocks, dtype=torch.float32)


@fake("attention_forward")
def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: str,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, ...]:
    qkv_format = parse_attention_config(config).qkv_format
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    q8, k8, v8 = (
        _fake_codes(x, qkv_format, cu) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_kv), (v, cu_seqlens_kv))
    )
    m, l = (q.new_empty(q8[0].shape[:-1], dtype=torch.float32) for _ in range(2))  # noqa: E741
    return o, m, l, *q8, *k8, *v8


@fake("attention_backward")
def _attention_backward(
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
    qkv_format = parse_attention_config(config).qkv_format
    dq, dk, dv = (do.new_empty(_shape_of(codes, qkv_format)) for codes in (q8, k8, v8))
    return dq, dk, dv


def _shape_of(codes: Tensor, qkv_format: str) -> tuple[int, ...]:
    """Of what the codes were cast from."""
    if qkv_format == "thd":
        return tuple(codes.shape)
    batch, heads, rows, channels = codes.shape
    return (batch, rows, heads, channels) if qkv_format == "bshd" else (rows, batch, heads, channels)
