"""A wrapper of ``torch.nn.functional.scaled_dot_product_attention``, installed while a model needs it."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lightning_fp8.attention.function import fp8_attention, why_not_fp8
from lightning_fp8.attention.ops import Band
from lightning_fp8.convert.attention_calls.owners import compare, current_owner, runs_in_fp8
from lightning_fp8.modules.linear_layer import autocast_dtype

_CAUSAL = Band(right=0)
_EVERYTHING = Band()
_DEVICES = ("cpu", "cuda", "meta")

MULTIHEAD = (
    "nn.MultiheadAttention does not run in FP8; use lightning_fp8.MultiheadAttention, or call "
    "torch.nn.functional.scaled_dot_product_attention"
)

_BUILT_IN = F.scaled_dot_product_attention
_torch: Any = _BUILT_IN
"""The wrapped function."""
_installed = False
"""Whether the wrapper is called, directly or through another wrapper around it."""
_lock = threading.RLock()  # a model may be freed, and uninstall the wrapper, at any allocation


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name; runs in FP8 if the current context and the calling module select it."""
    owner = current_owner()
    if not runs_in_fp8(owner, lambda: _why_not(query, key, value, attn_mask, dropout_p, scale, enable_gqa)):
        return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    compare(owner, query, key, is_causal)
    # [..., heads, rows, channels] to [batch, rows, heads, channels]
    q, k, v = (in_autocast_dtype(_with_batch(x)).transpose(1, 2) for x in (query, key, value))
    o = fp8_attention(q, k, v, band=_CAUSAL if is_causal else _EVERYTHING, softmax_scale=scale)
    return o.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def in_autocast_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype of torch.autocast, if that is enabled."""
    return x.to(autocast_dtype(x.device.type) or x.dtype)


def _with_batch(x: Tensor) -> Tensor:
    """``[..., H, L, D]`` to ``[B, H, L, D]``; ``[B, L, D]`` to ``[B, 1, L, D]``."""
    if x.dim() == 3:
        return x[:, None]
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None, enable_gqa: bool
) -> str:
    if mask is not None:
        return (
            "scaled_dot_product_attention got an attn_mask, which may be any mask; pass is_causal=True if it is "
            "causal, and no mask if it masks nothing"
        )
    if dropout > 0:
        return f"scaled_dot_product_attention got dropout_p={dropout:g}; set the model's attention dropout to 0"
    return why_not_softmax_scale(scale) or why_not_tensors(q, k, v, enable_gqa)


def why_not_softmax_scale(softmax_scale: Any) -> str:
    """Why attention with ``softmax_scale`` does not run in FP8; empty if it does."""
    if softmax_scale is None:
        return ""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        return f"its scale is a {type(softmax_scale).__name__}; make it a float"
    way_out = "; negate the queries" if -math.inf < softmax_scale < 0 else ""
    return "" if 0 < softmax_scale < math.inf else f"its scale is {softmax_scale}, not a finite number above 0{way_out}"


def why_not_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> str:
    """Why attention of ``[..., H, L, D]`` tensors does not run in FP8; empty if it does."""
    if any(type(x) not in (Tensor, nn.Parameter) for x in (q, k, v)):
        if type(q) in (FakeTensor, FunctionalTensor) and TracingContext.try_get() is not None:
            return MULTIHEAD  # Dynamo does not trace into it
        return f"its tensors are {type(q).__name__}, {type(k).__name__} and {type(v).__name__}, not plain tensors"
    if _sequences_are_split():
        return (
            "torch's context_parallel splits its sequences; DotProductAttention's cp_group runs such attention in FP8"
        )
    if any(x.is_nested or x.layout is not torch.strided for x in (q, k, v)):
        return "its tensors are nested or sparse; pad them"
    if q.device.type not in _DEVICES:
        return f"FP8 attention is not supported on {q.device.type}"
    heads = -3 if enable_gqa else -2
    fit = q.dim() == k.dim() == v.dim() >= 3 and q.shape[:heads] == k.shape[:heads] and k.shape[:-1] == v.shape[:-1]
    if not fit or (enable_gqa and (q.dim() < 4 or q.shape[-3] % max(k.shape[-3], 1))):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        return f"its tensors have shapes {shapes}, whose batches or heads do not match"
    if not q.numel() or not k.numel():
        return "its tensors are empty"
    return why_not_fp8(q, k, v, dtype=autocast_dtype(q.device.type))


@torch.compiler.assume_constant_result
def _sequences_are_split() -> bool:
    """Whether torch's ``context_parallel`` has replaced attention, so that tensors are a rank's part of sequences."""
    of = (getattr(each, "__module__", None) or "" for each in (F.scaled_dot_product_attention, _torch))
    return any(name.startswith("torch.distributed.tensor.experimental") for name in of)


def install() -> None:
    """Install the wrapper in ``torch.nn.functional``. No effect if installed."""
    global _torch, _installed
    with _lock:
        current = F.scaled_dot_product_attention
        if current is scaled_dot_product_attention or (_installed and current is not _BUILT_IN):
            return
        _torch, _installed = current, True
        F.scaled_dot_product_attention = scaled_dot_product_attention


def uninstall() -> None:
    """Remove the wrapper. It stays installed under another wrapper, and keeps deciding."""
    global _installed
    with _lock:
        if F.scaled_dot_product_attention is scaled_dot_product_attention:
            F.scaled_dot_product_attention = _torch
        _installed = _installed and F.scaled_dot_product_attention not in (_torch, _BUILT_IN)
