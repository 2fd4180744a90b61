"""The ops on CUDA tensors: planned once for tensors of one key; where there is no kernel, the specification computes.

Nothing here waits for the device: how many blocks start follows from shapes, and ``cu_seqlens`` on a card stay there.
Those on the host are copied at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_kernels.host.launchers.attention_batch import BatchTables
from lightning_fp8.ops.attention import cpu
from lightning_fp8.ops.attention.casts import rows_of_mean
from lightning_fp8.ops.attention.launches import Heads, LaunchedProblem, chosen, require_operands, rows_on, visible
from lightning_fp8.ops.attention.schema import (
    AttentionCall,
    Backward,
    Forward,
    Gradients,
    Kept,
    implement_attention,
    parse_attention_options,
    spaces_of,
)
from lightning_fp8.ops.core.dispatch import EmptyTensor, check_not_empty, current_device, planned
from lightning_fp8.ops.core.registration import implement
from lightning_fp8.ops.core.tensor_keys import PlainKey, tensor_key

CallKey = tuple[str, float | None, int | None]
"""The options' text form, the softmax scale, and the number of sequences where lengths come with each call."""


def attention_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Kept]:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    q, k, v = map(_with_channels_side_by_side, (q, k, v))
    plan = _forward_plan(
        q.device, q.is_cuda and current_device(), tensor_key(q), tensor_key(k), tensor_key(v), _call_key(call)
    )
    return plan(q, k, v, call)


def attention_backward(do: Tensor, o: Tensor, kept: Kept, key_rows: int, call: AttentionCall) -> Gradients:
    """See :mod:`lightning_fp8.ops.attention.schema`."""
    do = _with_channels_side_by_side(do)
    heads = kept.k8.shape[0]
    plan = _backward_plan(do.device, do.is_cuda and current_device(), tensor_key(do), heads, key_rows, _call_key(call))
    return plan(do, o, kept, key_rows, call)


@planned(cpu.attention_forward)
def _forward_plan(
    device: torch.device, q_key: PlainKey, k_key: PlainKey, v_key: PlainKey, call_key: CallKey
) -> Forward:
    qkv_format, sequences = _sequences(call_key)
    check_not_empty((*q_key[1], *k_key[1], *v_key[1], sequences))
    q, k, v = (Heads.of(tensor_key, qkv_format, sequences) for tensor_key in (q_key, k_key, v_key))
    require_operands(q, k, v)
    plan = chosen("forward", device, q.head_dim)
    problem = LaunchedProblem.of(q, k, AttentionCall(*call_key[:2]), call_key[2] is not None)
    return plan(device, problem, q, k, v)


@planned(cpu.attention_backward)
def _backward_plan(device: torch.device, do_key: PlainKey, heads: int, key_rows: int, call_key: CallKey) -> Backward:
    qkv_format, sequences = _sequences(call_key)
    check_not_empty((*do_key[1], heads, key_rows, sequences))
    do = Heads.of(do_key, qkv_format, sequences)
    keys = do.contiguous(qkv_format, heads, key_rows)
    plan = chosen("backward", device, do.head_dim)
    problem = LaunchedProblem.of(do, keys, AttentionCall(*call_key[:2]), call_key[2] is not None)
    return plan(device, problem, do, keys)


def _with_channels_side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call_key(call: AttentionCall) -> CallKey:
    cu_seqlens = call.cu_seqlens_q
    if (cu_seqlens is None) != (call.cu_seqlens_kv is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_kv come together; pass both or neither")
    return call.options_text, call.softmax_scale, None if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _sequences(call_key: CallKey) -> tuple[str, int]:
    """The format, and the sequences of ``thd``; of other formats, whose shape says it, 1."""
    qkv_format, sequences = parse_attention_options(call_key[0]).qkv_format, call_key[2]
    if qkv_format != "thd":
        return qkv_format, 1
    if sequences is None:
        raise EmptyTensor  # the specification says what is missing
    return qkv_format, sequences


def attention_tables(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, options_text: str, query_rows: int, key_rows: int, device: torch.device
) -> Tensor:
    """See :func:`lightning_fp8.ops.attention.attention_tables`."""
    queries, keys = spaces_of(cu_seqlens_q, cu_seqlens_kv, options_text, query_rows, key_rows)
    _, band, _, longest_query = parse_attention_options(options_text)
    if longest_query is not None:  # memory is saved by it, which longer sequences would need
        wrong = f"cu_seqlens_q has a sequence of more than {longest_query} rows; pass its max_seqlen_q"
        torch._assert_async((cu_seqlens_q.diff() <= longest_query).all(), wrong)  # type: ignore[call-overload]
    of_queries, of_keys = rows_on(device, (queries, keys), cu_seqlens_q, cu_seqlens_kv)
    return BatchTables.of(of_queries, of_keys, visible(band), rows_of_mean(band)).joined()


implement_attention("cuda", attention_forward, attention_backward)
for _device_type in ("cpu", "cuda"):  # of cu_seqlens, which may be on the host
    implement("attention_tables", _device_type, attention_tables)
