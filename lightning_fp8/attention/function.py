"""Attention in FP8 as a function with gradients, and what it keeps for them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.arguments import refuse_transforms
from lightning_fp8.attention import sequence_tables
from lightning_fp8.attention.ops import (
    BLOCK,
    FORMATS,
    Attention,
    AttentionCall,
    Band,
    Kept,
    attention_backward,
    attention_forward,
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
    eligible: bool = False,
) -> Tensor:
    """``softmax(softmax_scale q kᵀ) v``, its seven products forward and backward of E4M3 codes.

    Each of q, k, v and the output's gradient is scaled from itself in blocks of one head and 128 rows, under any
    recipe. Kept for the backward pass are the codes and scales of q, k and v, the output in BF16, and two float32
    numbers for each row.

    Args:
        q: bfloat16, float16 or float32, any strides: ``bshd [B, L, H, D]``, ``sbhd [L, B, H, D]`` or ``thd [T, H, D]``,
            sequences one after the other. D is at most 256.
        k, v: the same with ``H / G`` heads; query head ``h`` uses head ``h // G``.
        qkv_format: the name of the format.
        band: the keys that each query attends to; None is all keys of its sequence.
        softmax_scale: None is ``1 / sqrt(D)``.
        cu_seqlens_q, cu_seqlens_kv: integers ``[B + 1]``: for ``thd``, the start of each sequence; for other formats,
            the cumulative lengths. Later rows are padding: their results are 0, and they have no gradient.
        max_seqlen_q: for ``thd``, an upper bound of the lengths of query sequences, which saves memory on a GPU. A
            longer sequence is a device assertion there. None is T.
        center_keys: subtract a mean over the sequence from keys before they are cast. Softmax does not change;
            roundings do.
        slots: entries of an amax history for q, k and v together, for the output, and for their gradients.
        observe: whether to collect amaxes in ``slots``.
        eligible: whether the caller has asked :func:`why_not_fp8`.

    Returns:
        A contiguous tensor with q's shape and dtype; 0 for a query that attends to no key.

    Raises:
        TypeError: If dtypes differ.
        ValueError: If the dtype is not one of the three, if the format is unknown, if shapes, heads, devices or
            ``cu_seqlens`` do not match, if ``max_seqlen_q`` is too small, if the GPU has no kernels for D, or if
            ``softmax_scale`` is not finite and above 0.
        RuntimeError: If a transform of torch.func is active.
    """
    _check(q, k, v, qkv_format, cu_seqlens_q, cu_seqlens_kv)
    if softmax_scale is not None:
        require_softmax_scale(softmax_scale)
    refuse_transforms("Attention", q, k, v)
    if not eligible and (reason := why_not_fp8(q, k, v, center_keys=center_keys)):
        raise ValueError(f"{reason}: this does not run in FP8; use torch's scaled_dot_product_attention")
    longest = _longest(max_seqlen_q, cu_seqlens_q) if qkv_format == "thd" else None
    attention = Attention(qkv_format, band or Band(), center_keys, longest)
    if k is q:  # torch.compile takes no tensor twice
        k = k.view_as(k)
    if v is q or v is k:
        v = v.view_as(v)
    of_keys = None if cu_seqlens_kv is cu_seqlens_q else cu_seqlens_kv
    tables = None
    if cu_seqlens_q is not None and cu_seqlens_kv is not None and sequence_tables.on_card(q.device) and _keeps(q, k, v):
        row_dim = 1 if qkv_format == "bshd" else 0
        tables = sequence_tables.shared_tables(
            cu_seqlens_q, cu_seqlens_kv, attention, q.shape[row_dim], k.shape[row_dim], q.device
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
    check_longest("q", max_seqlen_q, cu_seqlens_q)
    bound = BLOCK
    while bound < max_seqlen_q:
        bound *= 2
    return bound


def _keeps(*tensors: Tensor) -> bool:
    """Whether autograd keeps what a function of ``tensors`` saves."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _observe(slots: Slots | None, role: Role, *tensors: Tensor | None) -> None:
    if slots is not None:
        for tensor in [x for x in tensors if x is not None]:
            ops.observe(tensor.detach(), slots[role].amax)


def _check(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None
) -> None:
    if qkv_format not in FORMATS:
        raise ValueError(f"qkv_format={qkv_format!r} is unknown; use one of {', '.join(FORMATS)}")
    dims, shapes = 3 if qkv_format == "thd" else 4, [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != dims for shape in shapes):
        raise ValueError(f"qkv_format={qkv_format!r} has {dims} dimensions; q, k and v have shapes {shapes}")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v of shapes {shapes} do not fit: keys are as many as values, as wide as queries")
    batch = {"bshd": 0, "sbhd": 1}.get(qkv_format)
    if batch is not None and q.shape[batch] != k.shape[batch]:
        raise ValueError(f"{q.shape[batch]} sequences of queries and {k.shape[batch]} of keys; both must be as many")
    if q.shape[-2] % max(k.shape[-2], 1) or (q.shape[-2] and not k.shape[-2]):
        raise ValueError(f"{q.shape[-2]} query heads cannot share {k.shape[-2]} heads of keys and values evenly")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give all in one dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv come together; pass both or neither")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if cu_seqlens is not None and cu_seqlens.device not in (q.device, torch.device("cpu")):
            raise ValueError(f"{name} is on {cu_seqlens.device} and q on {q.device}; move it there, or to the host")
    sequences = None if batch is None else q.shape[batch]
    for name, x, cu_seqlens in (("cu_seqlens_q", q, cu_seqlens_q), ("cu_seqlens_kv", k, cu_seqlens_kv)):
        check_cu_seqlens(name, cu_seqlens, qkv_format, sequences, x.shape[1 if qkv_format == "bshd" else 0])
    if cu_seqlens_q is not None and cu_seqlens_kv is not None and len(cu_seqlens_q) != len(cu_seqlens_kv):
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} values and cu_seqlens_kv {len(cu_seqlens_kv)}")


def require_softmax_scale(softmax_scale: Any) -> None:
    """Raises:
    TypeError: If it is not a number.
    ValueError: If it is not finite, or not above 0, for which torch's attention returns NaN.
    """
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale={softmax_scale!r} must be a number, or None for 1 / sqrt(channels of a head)")
    if not 0 < softmax_scale < math.inf:
        raise ValueError(
            f"softmax_scale={softmax_scale!r} must be finite and above 0; pass None for 1 / sqrt(channels of a head), "
            "or negate the queries for a negative scale"
        )


def check_longest(of: str, max_seqlen: int | None, cu_seqlens: Tensor | None) -> None:
    """Check, if the values are on the host, that no sequence has more rows; ``of`` is ``"q"`` or ``"kv"``.

    Raises:
        ValueError: If one has.
    """
    if max_seqlen is None or cu_seqlens is None or len(cu_seqlens) < 2 or not is_known(cu_seqlens):
        return
    longest = int(cu_seqlens.diff().max())
    if longest > max_seqlen:
        raise ValueError(
            f"max_seqlen_{of}={max_seqlen}, and cu_seqlens_{of} has a sequence of {longest} rows; "
            f"pass {longest}, or None"
        )


def is_known(x: Tensor) -> bool:
    """Whether the host can read the values of ``x`` without waiting for a GPU."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def check_cu_seqlens(name: str, cu_seqlens: Tensor | None, qkv_format: str, sequences: int | None, rows: int) -> None:
    """Check the starts of sequences in a tensor of ``rows``: L of a padded format, T of ``thd``.

    Values are checked only on the host: reading them from a GPU would wait for it.

    Raises:
        ValueError: If it is missing, not integers ``[B + 1]``, or of another batch, if it does not rise from 0, or if
            it exceeds the number of rows.
    """
    if cu_seqlens is None:
        if qkv_format == "thd":
            raise ValueError(f"qkv_format='thd' needs {name}, where each sequence starts; pass integers [B + 1]")
        return
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"{name} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; it must be int32 or int64 [B + 1]: 0 first, then "
            "where each sequence ends"
        )
    if sequences is not None and len(cu_seqlens) != sequences + 1:
        raise ValueError(f"{name} has {len(cu_seqlens)} values for {sequences} sequences; it must have one more")
    if not is_known(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name}={starts} does not rise from 0; it is the sequences' lengths added up, 0 first")
    longest = starts[-1] if qkv_format == "thd" else max(lengths, default=0)
    if longest > rows:
        what = "ends at row" if qkv_format == "thd" else "has a sequence of length"
        raise ValueError(f"{name}={starts} {what} {longest}; the tensor has {rows} rows in {qkv_format!r}")
