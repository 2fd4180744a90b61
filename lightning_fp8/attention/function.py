"""Attention in FP8 as a function with gradients, and what it keeps for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.arguments import refuse_transforms
from lightning_fp8.attention import sequence_tables
from lightning_fp8.attention.ops import (
    BLOCK,
    Attention,
    AttentionCall,
    Band,
    Kept,
    attention_backward,
    attention_forward,
    attention_tables,
    failing_kernel,
    missing_kernel,
)
from lightning_fp8.functions.dtypes import converted
from lightning_fp8.functions.product import Slots
from lightning_fp8.numerics.scaled import Role

LARGEST_HEAD = 256
"""Channels of a head; no kernel has room for more."""


def why_not_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype | None = None,
    center_keys: bool = True,
    of_codes: bool = False,
) -> str:
    """Why attention of these tensors does not run in FP8; empty if it does.

    On a GPU, the first call for a kind of tensors compiles and loads the kernels of both passes. Both are required even
    without gradients, because activation checkpointing runs a forward pass again, with gradients.

    Args:
        q, k, v: tensors in any QKV format.
        dtype: the dtype that they are converted to before they are cast to FP8; None is their own.
        center_keys: see :func:`fp8_attention`.
        of_codes: whether keys and values are gathered as FP8 codes; see
            :mod:`lightning_fp8.attention.context_parallel`.
    """
    if q.dtype not in ops.HIGH_PRECISION:
        return f"queries are {q.dtype}, not one of {', '.join(map(str, ops.HIGH_PRECISION))}"
    reason = why_not_heads(k.shape[-1], v.shape[-1])
    if reason or not q.is_cuda:
        return reason
    device, head_dim = q.device, q.shape[-1]
    return missing_kernel(device, head_dim) or failing_kernel(device, dtype or q.dtype, head_dim, center_keys, of_codes)


def why_not_heads(channels: int, value_channels: int) -> str:
    """Likewise of heads of so many channels in queries and keys, and in values."""
    if channels != value_channels:
        return f"a head of values has {value_channels} channels and one of keys {channels}"
    return "" if channels <= LARGEST_HEAD else f"a head has {channels} channels, more than {LARGEST_HEAD}"


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qkv_format: str = "bshd",
    band: Band | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    center_keys: bool = True,
    slots: Slots | None = None,
    observe: bool = False,
) -> Tensor:
    """``softmax(softmax_scale q kᵀ) v``, its seven products forward and backward of E4M3 codes.

    Each of q, k, v and the output's gradient is scaled from itself in blocks of one head and 128 rows, under any
    recipe. Kept for the backward pass are the codes and scales of q, k and v, the output in BF16, and two float32
    numbers for each row.

    The caller has asked :func:`why_not_fp8`, and checked shapes and values.

    Args:
        q, k, v, qkv_format, softmax_scale, cu_seqlens_q, cu_seqlens_kv: see
            :mod:`lightning_fp8.attention.ops.attention`. k and v have ``H / G`` heads; query head ``h`` uses head
            ``h // G``.
        band: the keys that each query attends to; None is all keys of its sequence.
        max_seqlen_q: for ``thd``, an upper bound of the lengths of query sequences, which saves memory on a GPU. A
            longer sequence is a device assertion there. None is T.
        center_keys: subtract a mean over the sequence from keys before they are cast.
        slots: entries of an amax history for q, k and v together, for the output, and for their gradients.
        observe: whether to collect amaxes in ``slots``.

    Returns:
        A contiguous tensor with q's shape and dtype; 0 for a query that attends to no key.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If devices differ, or if queries and keys have other numbers of channels.
        RuntimeError: If a transform of torch.func is active.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_kv)
    refuse_transforms("Attention", q, k, v)
    longest = _longest(max_seqlen_q, cu_seqlens_q) if qkv_format == "thd" else None
    attention = Attention(qkv_format, band or Band(), center_keys, longest)
    if k is q:  # torch.compile takes no tensor twice
        k = k.view_as(k)
    if v is q or v is k:
        v = v.view_as(v)
    of_keys = None if cu_seqlens_kv is cu_seqlens_q else cu_seqlens_kv
    tables = None
    is_kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # by autograd, for the backward pass
    if cu_seqlens_q is not None and cu_seqlens_kv is not None and is_kept and sequence_tables.on_card(q.device):
        query_rows, key_rows = (x.shape[1 if qkv_format == "bshd" else 0] for x in (q, k))
        (tables,) = sequence_tables.shared(
            q.device,
            (cu_seqlens_q, cu_seqlens_kv),
            (attention, query_rows, key_rows),
            lambda: (attention_tables(cu_seqlens_q, cu_seqlens_kv, attention, query_rows, key_rows, q.device),),
        )
    slots = slots if observe else None
    return AttentionFunction.apply(q, k, v, attention, softmax_scale, cu_seqlens_q, of_keys, tables, slots)


class AttentionFunction(torch.autograd.Function):
    """The gradients of :func:`fp8_attention`.

    ``cu_seqlens_kv`` of None is q's, ``tables`` of None are made by each op, ``slots`` of None observes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
        softmax_scale: float | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        tables: Tensor | None,
        slots: Slots | None,
    ) -> Tensor:
        of_keys = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
        o, kept = attention_forward(q, k, v, AttentionCall(attention, softmax_scale, cu_seqlens_q, of_keys, tables))
        _observe(slots, Role.QKV, q, k, v)
        _observe(slots, Role.O, o)
        ctx.save_for_backward(converted(o, torch.bfloat16), cu_seqlens_q, cu_seqlens_kv, tables, *kept)
        ctx.attention, ctx.softmax_scale, ctx.slots = attention, softmax_scale, slots
        ctx.key_rows = k.shape[1 if attention.qkv_format == "bshd" else 0]
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "FP8 attention has no second derivatives, which create_graph=True asks for; run this attention in high "
                "precision: with fp8_autocast(enabled=False), or a recipe with fp8_dpa=False"
            )
        o, cu_seqlens_q, cu_seqlens_kv, tables, *kept = ctx.saved_tensors
        _observe(ctx.slots, Role.DO, do)
        of_keys = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
        call = AttentionCall(ctx.attention, ctx.softmax_scale, cu_seqlens_q, of_keys, tables)
        gradients = attention_backward(do, o, Kept(*kept), ctx.key_rows, call)
        needed = [gradient if needs else None for gradient, needs in zip(gradients, ctx.needs_input_grad)]
        _observe(ctx.slots, Role.DQKV, *needed)
        return *needed, *[None] * 6


def _longest(max_seqlen_q: int | None, cu_seqlens_q: Tensor | None) -> int | None:
    """The next power of two, of which there are few to plan and compile for."""
    if max_seqlen_q is None or cu_seqlens_q is None:
        return None
    bound = BLOCK
    while bound < max_seqlen_q:
        bound *= 2
    return bound


def _observe(slots: Slots | None, role: Role, *tensors: Tensor | None) -> None:
    if slots is not None:
        for tensor in [x for x in tensors if x is not None]:
            ops.observe(tensor.detach(), slots[role].amax)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give all in one dtype")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries have {q.shape[-1]} channels and keys {k.shape[-1]}; both must have as many")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if cu_seqlens is not None and cu_seqlens.device not in (q.device, torch.device("cpu")):
            raise ValueError(f"{name} is on {cu_seqlens.device} and q on {q.device}; move it there, or to the host")
