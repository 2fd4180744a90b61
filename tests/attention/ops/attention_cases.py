"""What FP8 attention is run on and compared with: the definition of attention and of its masks in float64."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from benchmarks.contenders.attention_data import Inputs
from lightning_fp8.attention.ops import (
    Band,
    Codes,
    Lengths,
    backward,
    cast,
    forward,
    rows_of_mean,
)

CAUSAL = Band(right=0)
NAMES = ("O", "dQ", "dK", "dV")


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV in float64 by autograd of the definition; rows that see no key are 0."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e300))
    o = weights @ v.repeat_interleave(group, 1) / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


@functools.cache
def visible_keys(queries: int, keys: int, band: Band) -> Tensor:
    """The band said in words of FlashAttention's documentation."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    shift = keys - queries if band.bottom_right else 0
    out = torch.ones(queries, keys, dtype=torch.bool)
    if band.left is not None:
        out &= j >= i + shift - band.left
    if band.right is not None:
        out &= j <= i + shift + band.right
    return out


def quantized(
    x: Inputs, band: Band, centered: bool = True, lengths: Lengths | None = None
) -> tuple[Codes, Codes, Codes, Codes]:
    queries, keys = lengths if lengths is not None else (None, None)
    k = cast(x.k, centered, keys, rows_of_mean(band))
    return cast(x.q, False, queries), k, cast(x.v, False, keys), cast(x.do, False, queries)


def fp8(
    x: Inputs, band: Band, centered: bool = True, lengths: Lengths | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV; and m, l."""
    q, k, v, do = quantized(x, band, centered, lengths)
    scale = x.q.shape[-1] ** -0.5
    o, m, l = forward(q, k, v, scale, band, lengths, dtype)  # noqa: E741
    return o, *backward(do, q, k, v, o, m, l, scale, band, lengths, dtype), m, l


def rounded(x: Inputs, band: Band, centered: bool = True) -> Inputs:
    return Inputs(*(codes.dequantize() for codes in quantized(x, band, centered)))


def error(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def drawn(heads: int, shared: int, queries: int, keys: int, channels: int = 64, batch: int = 1) -> Inputs:
    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, channels).bfloat16()

    return Inputs(normal(heads, queries), normal(shared, keys), normal(shared, keys), normal(heads, queries))
