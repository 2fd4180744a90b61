"""The attention and mask functions that transformers' models call if their configuration selects ``"lightning_fp8"``.

Imported only if a model is transformers'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from lightning_fp8.attention.function import fp8_attention
from lightning_fp8.attention.ops import Band
from lightning_fp8.attention.sequence_tables import shared
from lightning_fp8.capture import is_capturing
from lightning_fp8.convert.attention_calls.bands import (
    Padded,
    band_of,
    carried,
    dense,
    ends_padded,
    from_carried,
    is_carried,
)
from lightning_fp8.convert.attention_calls.owners import (
    compare,
    current_owner,
    in_high_precision,
    owner_of,
    runs_in_fp8,
)
from lightning_fp8.convert.attention_calls.sdpa import in_autocast_dtype, why_not_softmax_scale, why_not_tensors

NAME = "lightning_fp8"

_WITHOUT = {
    "softcap": "its scores are capped (softcap)",
    "s_aux": "its softmax has sinks (s_aux)",
    "position_bias": "a position bias is added to its scores",
    "head_mask": "it has a head_mask",
    "cache": "it has a paged key/value cache",
    "output_attentions": "output_attentions=True returns the weights",
}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function for transformers: ``[B, H, L, D]`` to ``[B, L, H, D]``; returns no attention weights."""
    owner = owner_of(module) or current_owner()
    if not torch.compiler.is_compiling():
        owner.training = module.training
    if not runs_in_fp8(owner, lambda: _why_not(query, key, value, attention_mask, dropout, scaling, kwargs)):
        if is_carried(attention_mask):
            attention_mask = dense(from_carried(attention_mask), query.shape[2])  # type: ignore[arg-type]
        with in_high_precision():
            return AttentionInterface()["sdpa"](
                module, query, key, value, attention_mask, dropout, scaling=scaling, is_causal=is_causal, **kwargs
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    band = Band(right=0 if causal and query.shape[2] > 1 else None)
    lengths: tuple[Tensor | None, ...] = (None, None)
    if attention_mask is not None and is_carried(attention_mask):
        padded, queries = from_carried(attention_mask), query.shape[2]
        band = padded.band
        lengths = shared(
            query.device, (attention_mask,), ("lengths", queries), lambda: _lengths(padded.key_mask, queries)
        )
    compare(owner, query, key, band.right == 0, plain=lengths[0] is None and band.left is None)
    q, k, v = (in_autocast_dtype(x).transpose(1, 2) for x in (query, key, value))
    of_queries, of_keys = lengths
    o = fp8_attention(q, k, v, band=band, softmax_scale=scaling, cu_seqlens_q=of_queries, cu_seqlens_kv=of_keys)
    return o, None


def _lengths(key_mask: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """``cu_seqlens`` of all queries, padding included as in transformers' own masks, and of keys without padding."""
    counts = key_mask.sum(1, dtype=torch.int32)
    of_queries = torch.arange(key_mask.shape[0] + 1, device=key_mask.device, dtype=torch.int32) * queries
    return of_queries, torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> str:
    for name, reason in _WITHOUT.items():
        if kwargs.get(name) not in (None, False) if name == "output_attentions" else kwargs.get(name) is not None:
            return reason
    if dropout > 0:
        return f"its dropout is {dropout:g}; set attention_dropout=0 in the model's configuration"
    if q.shape[2] != k.shape[2] and (q.shape[2] == 1 or (mask is not None and mask.dim() == 4)):
        return "keys and values come from a cache"
    if mask is not None and not is_carried(mask):
        return (
            "its mask is not causal or a window with padding at the end: packed sequences, padding at the start, "
            "or a custom mask"
        )
    return why_not_softmax_scale(scaling) or why_not_tensors(q, k, v, enable_gqa=True)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    local_size: int | None = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """A mask function for transformers. Returns None without a mask, a :func:`carried` band, or a dense mask.

    Compiled code and captures cannot check values, and assert them: packed sequences and padding at the start fail.
    """
    band = None
    tracing = torch.compiler.is_compiling() or is_capturing()
    skips = allow_is_causal_skip or allow_is_bidirectional_skip
    own = use_vmap or getattr(kwargs.get("config"), "attention_chunk_size", None) is not None
    from_the_beginning = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    fits = attention_mask is None or (attention_mask.dim() == 2 and attention_mask.shape[1] == kv_length)
    if from_the_beginning and fits and not own and (q_length == kv_length or allow_is_bidirectional_skip):
        if skips:
            band = band_of(mask_function)
        elif tracing and attention_mask is None:
            # transformers cannot check whether position_ids are those of packed sequences, and assumes they are.
            band = Band(None if local_size is None else local_size - 1, 0)
            _assert_band(mask_function, band, batch_size, q_length, device)
    if band is not None and attention_mask is not None:
        if tracing:
            torch._assert_async(ends_padded(attention_mask), _WRONG_PADDING)  # type: ignore[call-overload]
        elif not (full := bool(attention_mask.all())) and not ends_padded(attention_mask):
            band = None
        elif full:
            attention_mask = None
    if band is None:
        return masking_utils.sdpa_mask(  # type: ignore[no-any-return]
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, use_vmap=use_vmap, local_size=local_size,
            device=device, **kwargs,
        )  # fmt: skip
    limited = (band.left is not None and band.left < kv_length - 1) or (band.right or 0) > 0
    if attention_mask is None and not limited:
        return None
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return carried(Padded(attention_mask.bool(), band))


_WRONG_PADDING = (
    "a compiled or captured model supports FP8 attention only with padding at the end of sequences; pad on the right, "
    "compile the model's layers instead of the whole, or pass attention=False"
)
_PACKED = (
    "a compiled or captured model does not support FP8 attention of packed sequences; compile its layers instead, "
    "pass an attention_mask, or attention=False"
)


def _assert_band(mask_function: Callable[..., Any], band: Band, batch: int, sequence_length: int, device: Any) -> None:
    """Assert in compiled code that a query attends to its predecessor and its window's last key, and none outside."""
    sequence = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    i = torch.arange(sequence_length, device=device)[None]
    checks = [(1, False), (-1, band.left is None or band.left > 0)]
    checks += [] if band.left is None else [(-band.left, True), (-band.left - 1, False)]
    for offset, seen in checks:
        if abs(offset) < sequence_length:
            queries = i[:, max(0, -offset) : sequence_length - max(0, offset)]
            found = mask_function(sequence, head, queries, queries + offset)
            torch._assert_async((found == seen).all(), _PACKED)  # type: ignore[call-overload]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def supported() -> bool:
    """Whether this version of transformers passes a mask function all that it needs."""
    return "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters
