"""The schemas of attention's ops, and their shapes on fake and meta tensors.

Queries, keys, values and gradients come in one of Transformer Engine's formats, any strides: ``bshd [B, L, H, D]``,
``sbhd [L, B, H, D]``, or ``thd [T, H, D]``, sequences one after the other. Outputs and gradients are contiguous in the
same format. ``cu_seqlens``, integers ``[B + 1]``, says where each sequence of ``thd`` starts, and rows behind the last
one are padding; with the other formats its differences are lengths, and the rows after them padding.

``softmax_scale`` is ``c`` of ``softmax(c q kᵀ)``; None is ``1 / sqrt(D)``.

What the forward op gives beside ``o`` is for the backward op alone: :class:`Kept`, in packed rows, R of queries or of
keys. Each sequence begins at a multiple of 128 rows there, so that a block of scales is a sequence's own: ``R = B
ceil(L / 128) 128`` of a padded batch. Of ``thd`` sequence ``b`` begins with block ``cu_seqlens[b] // 128 + b`` of
``T // 128 + B``: room for every choice of lengths, which no host has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_kernels.host.launchers.attention_batch import joined_numel
from cuda_kernels.host.launchers.attention_tiles import RowSpace
from lightning_fp8.formats import E4M3
from lightning_fp8.ops.attention.casts import rows_of_mean
from lightning_fp8.ops.attention.masks import Band
from lightning_fp8.ops.core.options import parse_options
from lightning_fp8.ops.core.registration import define, fake, implement, refuse_vmap

FORMATS = ("sbhd", "bshd", "thd")


class AttentionCall(NamedTuple):
    """The last arguments of both ops.

    Attributes:
        options_text: what :func:`format_attention_options` makes.
        softmax_scale: ``c``; None is ``1 / sqrt(D)``.
        cu_seqlens_q, cu_seqlens_kv: integers ``[B + 1]``, both or neither; needed for ``thd``.
        tables: what :func:`lightning_fp8.ops.attention.attention_tables` makes of both; each op makes its own of None.
    """

    options_text: str
    softmax_scale: float | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    tables: Tensor | None = None

    def softmax_scale_of(self, channels: int) -> float:
        """``c`` for heads of so many channels."""
        return channels**-0.5 if self.softmax_scale is None else self.softmax_scale


class Kept(NamedTuple):
    """What the backward pass needs beside the output, in packed rows.

    Attributes:
        m, l: float32 ``[H, R]`` of queries: see :func:`lightning_fp8.ops.attention.reference.forward`.
        q8, k8, v8: E4M3 ``[H, R, D]``; 0 where no row is.
        q_scale_inv, k_scale_inv, v_scale_inv: float32 ``[H, R / 128]``; 1 where no row is.
    """

    m: Tensor
    l: Tensor  # noqa: E741
    q8: Tensor
    q_scale_inv: Tensor
    k8: Tensor
    k_scale_inv: Tensor
    v8: Tensor
    v_scale_inv: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Kept]]
"""``(q, k, v, call) -> (o, kept)``"""
Backward = Callable[[Tensor, Tensor, Kept, int, AttentionCall], Gradients]
"""``(do, o, kept, key_rows, call) -> (dq, dk, dv)``; ``key_rows``: L of keys, or T of ``thd``."""

_CALL = (
    "str options, float? softmax_scale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? tables=None"
)
_KEPT = ", ".join(f"Tensor {name}" for name in Kept._fields)

define("attention_forward", f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor o, {_KEPT})")
define(
    "attention_backward",
    f"(Tensor do, Tensor o, {_KEPT}, SymInt key_rows, {_CALL}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
define(
    "attention_tables",
    "(Tensor cu_seqlens_q, Tensor cu_seqlens_kv, str options, SymInt query_rows, SymInt key_rows, Device device) -> "
    "Tensor",
)
refuse_vmap("attention_forward", "attention_backward", "attention_tables")


def _as_ops(forward: Forward, backward: Backward) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """Both passes with the dispatcher's arguments, by the ops' names."""
    kept = len(Kept._fields)

    def attention_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, ...]:
        o, kept = forward(q, k, v, AttentionCall(*call))
        return o, *kept

    def attention_backward(do: Tensor, o: Tensor, *others: Any) -> Gradients:
        return backward(do, o, Kept(*others[:kept]), others[kept], AttentionCall(*others[kept + 1 :]))

    return {"attention_forward": attention_forward, "attention_backward": attention_backward}


def implement_attention(device_type: str, forward: Forward, backward: Backward) -> None:
    """Register what computes both ops on ``"cpu"`` or ``"cuda"``."""
    for name, op in _as_ops(forward, backward).items():
        implement(name, device_type, op)


class AttentionOptions(NamedTuple):
    """What the string says: ``"thd left=64 right=0 bottom_right longest_query=512 centered"``.

    Attributes:
        qkv_format: one of :data:`FORMATS`.
        band: which keys a query sees.
        centered: keys are cast without their mean, or that of the first ones: see
            :func:`lightning_fp8.ops.attention.casts.rows_of_mean`.
        longest_query: no sequence of queries has more rows; None is all of the tensor's.
    """

    qkv_format: str
    band: Band
    centered: bool
    longest_query: int | None = None


def format_attention_options(
    qkv_format: str, band: Band | None = None, centered: bool = True, longest_query: int | None = None
) -> str:
    """The string for a call; the softmax scale is no part of it, a number that torch.compile may let vary."""
    words = [qkv_format]
    if band is not None:
        words += [] if band.left is None else [f"left={band.left}"]
        words += [] if band.right is None else [f"right={band.right}"]
        words += ["bottom_right"] if band.bottom_right else []
    words += [] if longest_query is None else [f"longest_query={longest_query}"]
    return " ".join([*words, "centered"] if centered else words)


@lru_cache(maxsize=1024)
def parse_attention_options(text: str) -> AttentionOptions:
    """What ``text`` says.

    Raises:
        ValueError: it names another format first, or says a word that is none of :class:`AttentionOptions`'s.
    """
    qkv_format, _, words = text.partition(" ")
    if qkv_format not in FORMATS:
        raise ValueError(f"options={text!r} names the format {qkv_format!r}; use one of {', '.join(FORMATS)}")
    said = parse_options(words, ("left", "right", "bottom_right", "centered", "longest_query"))
    left, right, longest = (int(said[name]) if name in said else None for name in ("left", "right", "longest_query"))
    return AttentionOptions(qkv_format, Band(left, right, "bottom_right" in said), "centered" in said, longest)


def row_space(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None, rows: int | None = None) -> RowSpace:
    """The packed rows of a tensor in ``qkv_format``; of one that is like ``x`` but for its number of ``rows``."""
    if qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("qkv_format='thd' needs cu_seqlens, where each sequence starts; pass integers [B + 1]")
        return RowSpace(cu_seqlens.shape[0] - 1, x.shape[0] if rows is None else rows, True)
    length, batch = (1, 0) if qkv_format == "bshd" else (0, 1)
    return RowSpace(x.shape[batch], x.shape[length] if rows is None else rows, False)


def shape_of_keys(do: Tensor, kept: Kept, key_rows: int, qkv_format: str) -> tuple[int, ...]:
    """The shape of k and v."""
    heads, _, channels = kept.k8.shape
    padded = (do.shape[0], key_rows) if qkv_format == "bshd" else (key_rows, do.shape[1])
    return (*((key_rows,) if qkv_format == "thd" else padded), heads, channels)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    qkv_format = parse_attention_options(call.options_text).qkv_format
    queries, keys = row_space(q, qkv_format, call.cu_seqlens_q), row_space(k, qkv_format, call.cu_seqlens_kv)
    kept = []
    for x, space in ((q, queries), (k, keys), (v, keys)):
        heads, channels = x.shape[-2:]
        kept.append(x.new_empty((heads, space.total, channels), dtype=E4M3.dtype))
        kept.append(x.new_empty((heads, space.blocks), dtype=torch.float32))
    m, l = (q.new_empty((q.shape[-2], queries.total), dtype=torch.float32) for _ in range(2))  # noqa: E741
    return q.new_empty((*q.shape[:-1], v.shape[-1])), Kept(m, l, *kept)


def _fake_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    shape = shape_of_keys(do, kept, key_rows, parse_attention_options(call.options_text).qkv_format)
    return do.new_empty(do.shape), do.new_empty(shape), do.new_empty(shape)


@fake("attention_tables")
def _fake_tables(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, options_text: str, query_rows: int, key_rows: int, device: torch.device
) -> Tensor:
    spaces = spaces_of(cu_seqlens_q, cu_seqlens_kv, options_text, query_rows, key_rows)
    numel = joined_numel(*spaces, rows_of_mean(parse_attention_options(options_text).band))
    return cu_seqlens_q.new_empty(numel, dtype=torch.int32, device=device)


def spaces_of(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, options_text: str, query_rows: int, key_rows: int
) -> tuple[RowSpace, RowSpace]:
    """The packed rows of queries and of keys; rows: L, or T of ``thd``."""
    ragged, pairs = options_text.startswith("thd"), ((cu_seqlens_q, query_rows), (cu_seqlens_kv, key_rows))
    queries, keys = (RowSpace(cu_seqlens.shape[0] - 1, rows, ragged) for cu_seqlens, rows in pairs)
    return queries, keys


for _name, _op in _as_ops(_fake_forward, _fake_backward).items():
    fake(_name)(_op)
