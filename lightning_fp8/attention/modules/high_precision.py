"""Attention in the tensors' own precision: torch's ``scaled_dot_product_attention`` with Transformer Engine's options.

Biases, ALiBi, softmax with a sink, dropout and arbitrary masks are passed as one mask that is added to the scores. If
none of these is used, and there is no padding or window, torch chooses its fastest back end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention  # by name: not what attention/sdpa.py puts there

from lightning_fp8.arguments import one_of
from lightning_fp8.attention.modules.arguments import BIAS_TYPES
from lightning_fp8.attention.ops import Band, Lengths
from lightning_fp8.attention.ops.masks import hidden


class Extras(NamedTuple):
    """Options that FP8 attention does not support.

    Attributes:
        mask: bool, broadcastable to ``[B, H, Lq, Lk]``; True is masked out.
        bias: added to the scaled scores; broadcastable likewise.
        slopes: the slopes of ALiBi, ``[H]`` or ``[B, H]``.
        sink: ``[1, H, 1, 1]``, a score that is added only to the denominator of the softmax.
        dropout: the dropout probability.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout: float = 0.0


def extras_of(
    mask_type: str,
    attention_mask: Any,
    bias_type: str,
    bias: Tensor | None,
    slopes: Tensor | None,
    sink: Tensor | None,
    q: Tensor,
    softmax_scale: float,
    dropout: float,
) -> Extras:
    """The options in Transformer Engine's arguments, for queries ``q [..., H, D]``.

    Raises:
        ValueError: If an argument is passed without another that it requires.
        TypeError: If a bias is not of a floating-point dtype.
    """
    one_of("core_attention_bias_type", bias_type, BIAS_TYPES)
    mask = attention_mask if mask_type == "arbitrary" else None
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        raise ValueError("attn_mask_type='arbitrary' takes one attention_mask, a bool tensor, True where masked out")
    if (bias is not None) != bias_type.endswith("scale_bias"):
        raise ValueError(
            f"core_attention_bias_type={bias_type!r} with "
            + ("a core_attention_bias; pass 'post_scale_bias'" if bias is not None else "no core_attention_bias")
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(
            f"core_attention_bias is {bias.dtype}; it is added to the scores and must be of floating point. What hides "
            "keys is attention_mask with attn_mask_type='arbitrary'"
        )
    if slopes is not None and bias_type != "alibi":
        raise ValueError(f"alibi_slopes with core_attention_bias_type={bias_type!r}; pass 'alibi'")
    if slopes is None and bias_type == "alibi":
        slopes = alibi_slopes(q.shape[-2], q.device)
    if bias is not None and bias_type == "pre_scale_bias":
        bias = bias * softmax_scale
    return Extras(mask, bias, slopes, sink, dropout)


def fitted(extras: Extras, scores: Sequence[int], most: tuple[int | None, int | None] = (None, None)) -> Extras:
    """Fit ``extras`` to attention scores.

    Args:
        extras: the mask, the bias and the slopes of the call.
        scores: the shape of the scores, ``[b, h, sq, skv]``; sq and skv are the lengths of the longest sequences.
        most: upper bounds of sq and skv. A mask or a bias may have these sizes, and is then cut to sq rows and skv
            keys. None allows no other size than sq or skv.

    Raises:
        ValueError: If a mask, a bias or slopes cannot be broadcast to the scores.
    """
    mask = _fitted("attention_mask", extras.mask, scores, most)
    bias = _fitted("core_attention_bias", extras.bias, scores, most)
    slopes = extras.slopes
    if slopes is not None and not (slopes.dim() and _broadcasts(slopes.shape, scores[:2])):
        raise ValueError(
            f"alibi_slopes has shape {list(slopes.shape)}; it must be [h] or [b, h], here {list(scores[:2])}"
        )
    return extras._replace(mask=mask, bias=bias)


def _fitted(name: str, x: Tensor | None, scores: Sequence[int], most: tuple[int | None, int | None]) -> Tensor | None:
    if x is None:
        return None
    given = x.shape
    for dim, longest in ((-2, most[0]), (-1, most[1])):
        if longest is not None and -dim <= x.dim() and longest == x.shape[dim] > scores[dim]:
            x = x.narrow(dim, 0, scores[dim])
    if not _broadcasts(x.shape, scores):
        or_most = "" if most == (None, None) else ", or max_seqlen_q and max_seqlen_kv in place of sq and skv"
        raise ValueError(
            f"{name} has shape {list(given)}; it must broadcast to [b, h, sq, skv], here {list(scores)}{or_most}"
        )
    return x


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    aligned = zip(reversed(shape), reversed(wanted))
    return len(shape) <= len(wanted) and all(size in (1, of) for size, of in aligned)


def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, band: Band, lengths: Lengths | None, extras: Extras
) -> Tensor:
    """``[B, H, Lq, D]`` of q ``[B, H, Lq, D]`` and k, v ``[B, H / G, Lk, D]``; 0 for a query that attends to no key."""
    share = q.shape[1] != k.shape[1]
    num_queries, num_keys = q.shape[2], k.shape[2]
    causal = band.left is None and band.right == 0
    if num_queries != num_keys:  # not an expression: torch.compile makes one of dynamic lengths that is not a bool
        causal = causal and not band.bottom_right
    added = extras.mask is not None or extras.bias is not None or extras.slopes is not None or extras.sink is not None
    if lengths is None and not added and (causal or not band.limited):
        return scaled_dot_product_attention(
            q, k, v, None, extras.dropout, is_causal=causal, scale=softmax_scale, enable_gqa=share
        )
    padding = None
    if lengths is not None:  # 0 times a value in padding is 0 only if that is finite
        padding = _padding(lengths.queries, num_queries)
        q = q.masked_fill(padding, 0)
        k, v = (x.masked_fill(_padding(lengths.keys, num_keys), 0) for x in (k, v))
    of = lengths or Lengths(*(torch.full((1,), n, device=q.device) for n in (num_queries, num_keys)))
    unseen = hidden(band, slice(0, num_queries), slice(0, num_keys), of, padded=lengths is not None)
    unseen = None if unseen is None else unseen[:, None]
    if extras.mask is not None:
        unseen = extras.mask if unseen is None else unseen | extras.mask
    blind = None if unseen is None or extras.sink is not None else unseen.all(-1, keepdim=True)
    if extras.bias is None and extras.slopes is None and extras.sink is None:
        assert unseen is not None
        assert blind is not None
        mask = ~unseen | blind
    else:
        mask = torch.zeros(1, 1, num_queries, num_keys, dtype=q.dtype, device=q.device)
        if extras.bias is not None:
            mask = mask + extras.bias.to(q.dtype)
        if extras.slopes is not None:
            mask = mask + _alibi(extras.slopes, num_queries, num_keys, band, of).to(q.dtype)
        if unseen is not None:
            mask = mask.masked_fill(unseen if blind is None else unseen & ~blind, -math.inf)
    if extras.sink is not None:
        sink = extras.sink.to(q.dtype).expand(*mask.shape[:1], q.shape[1], num_queries, 1)
        mask = torch.cat([mask.expand(-1, q.shape[1], -1, -1), sink], 3)
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
    o = scaled_dot_product_attention(q, k, v, mask, extras.dropout, scale=softmax_scale, enable_gqa=share)
    zero = padding if blind is None else blind
    return o if zero is None else o.masked_fill(zero, 0.0)


_ROWS_OF_LOGITS = 128


@torch.no_grad()
def max_logits(
    q: Tensor, k: Tensor, softmax_scale: float, band: Band, lengths: Lengths | None, extras: Extras
) -> Tensor:
    """The largest score of each head, float32 ``[H]``, of q ``[B, H, Lq, D]`` and k ``[B, H / G, Lk, D]``.

    The scores are scaled, with their bias, and masked. The result is -inf for a head whose scores are all masked. The
    scores of 128 queries are in memory at a time.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(2, 3)
    of = lengths or Lengths(*(torch.full((1,), n, device=q.device) for n in (num_queries, num_keys)))
    alibi = None if extras.slopes is None else _alibi(extras.slopes, num_queries, num_keys, band, of)
    largest = torch.full((q.shape[1],), -math.inf, device=q.device)
    for start in range(0, num_queries, _ROWS_OF_LOGITS):
        rows = slice(start, min(start + _ROWS_OF_LOGITS, num_queries))
        scores = q[:, :, rows].float() @ k * softmax_scale
        for added in (extras.bias, alibi):
            scores = scores if added is None else scores + _rows_of(added, rows)
        unseen = hidden(band, rows, slice(0, num_keys), of, padded=lengths is not None)
        if unseen is not None:
            scores = scores.masked_fill(unseen[:, None], -math.inf)
        if extras.mask is not None:
            scores = scores.masked_fill(_rows_of(extras.mask, rows), -math.inf)
        largest = torch.maximum(largest, scores.amax((0, 2, 3)))
    return largest


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    return x[..., rows, :] if x.dim() > 1 and x.shape[-2] > 1 else x


def _padding(lengths: Tensor, rows: int) -> Tensor:
    """True where a padded batch holds no row of a sequence: ``[B, 1, L, 1]``."""
    return (torch.arange(rows, device=lengths.device) >= lengths[:, None])[:, None, :, None]


def _alibi(slopes: Tensor, num_queries: int, num_keys: int, band: Band, lengths: Lengths) -> Tensor:
    """``-slope |j - i - shift|``, float32 ``[B or 1, H, Lq, Lk]`` (Press et al., arXiv:2108.12409)."""
    i = torch.arange(num_queries, device=slopes.device)[:, None]
    j = torch.arange(num_keys, device=slopes.device)
    distance = (j - i).expand(1, num_queries, num_keys)
    if band.bottom_right:
        distance = distance - (lengths.keys - lengths.queries).to(slopes.device)[:, None, None]
    return -slopes.float()[..., None, None] * distance.abs()[:, None]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slopes of the paper, float32 ``[H]``: a geometric sequence for the largest power of two of heads, and every
    other slope of the next power of two for the rest."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
