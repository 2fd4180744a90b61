"""Queries, keys, values and gradients of the output for measurements of FP8 attention.

Synthetic: ``gauss``; ``outlier``, the FlashAttention-3 paper's N(0, 1) with one in a thousand from N(0, 100)
(arXiv:2407.08608, section 4.3); ``channel``, keys with a mean in some channels, as in language models, and gradients
whose rows differ by orders of magnitude; ``sink``, one key that gets nine tenths of every row's attention and whose
value is near 0 (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453). Known
limits, designed to fail: ``late keys`` and ``value offset``. Trained: every layer of the example's GPT, in the middle
and at the end of a short training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """BF16 ``[batch, heads, length, channels]`` each; ``do`` is the gradient of attention's output."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def gauss(heads: int = 2, length: int = 1024, channels: int = 128, seed: int = 0) -> Inputs:
    return _bfloat16(*_normal(4, heads, length, channels, seed))


def outlier(heads: int = 2, length: int = 1024, channels: int = 128, seed: int = 0) -> Inputs:
    *tensors, do = _normal(4, heads, length, channels, seed)
    far = _normal(3, heads, length, channels, seed + 1)
    rare = torch.rand(3, *do.shape, generator=_generator(seed + 2)) < 1e-3
    return _bfloat16(*(x + 10 * y * chosen for x, y, chosen in zip(tensors, far, rare)), do)


def channel(heads: int = 2, length: int = 1024, channels: int = 128, seed: int = 0) -> Inputs:
    q, k, v, do = _normal(4, heads, length, channels, seed)
    (rows,) = _normal(1, heads, length, 1, seed + 1)
    k[..., :4] += 12
    q[..., :4] += 1
    v[..., 5] += 4
    return _bfloat16(q, k, v, do * torch.exp(2 * rows))


def sink(length: int = 4096, strength: float = 11.0, channels: int = 128, seed: int = 3) -> Inputs:
    """``strength``: the scaled score of the first key in each row; the others' are near 0."""
    q, k, v, do = _normal(4, 1, length, channels, seed)
    q, one = q / 2, 7
    q[..., one] = 4
    k[..., one] = 0
    k[..., 0, :] = 0
    k[..., 0, one] = strength * math.sqrt(channels) / 4
    v[..., 0, :] /= 100
    return _bfloat16(q, k, v, do)


LATE = 128
"""Number of keys at the end of :func:`late_keys` that earlier rows do not attend to."""


def late_keys(heads: int = 2, length: int = 1024, channels: int = 128, offset: float = 64.0, seed: int = 0) -> Inputs:
    """The last 128 keys share an offset, which shifts the mean of all; rows that attend to them have no gradient."""
    q, k, v, do = _normal(4, heads, length, channels, seed)
    k[..., -LATE:, :] += offset
    do[..., -LATE:, :] = 0
    return _bfloat16(q, k, v, do)


def value_offset(
    heads: int = 2, length: int = 1024, channels: int = 128, offset: float = 16.0, seed: int = 0
) -> Inputs:
    """All values share an offset, which does not affect the exact dQ, dK and dV."""
    q, k, v, do = _normal(4, heads, length, channels, seed)
    return _bfloat16(q, k, v + offset, do)


DRAWN: dict[str, Callable[[], Inputs]] = {"gauss": gauss, "outlier": outlier, "channel": channel, "sink": sink}
LIMITS: dict[str, Callable[[], Inputs]] = {"late keys": late_keys, "value offset": value_offset}


def trained(
    steps: int = 500,
    width: int = 256,
    heads: int = 2,
    depth: int = 4,
    length: int = 1024,
    say: Callable[[str], None] = lambda line: None,
) -> dict[int, list[Inputs]]:
    """Train the example's GPT for ``steps``; returns the inputs of each layer's attention in the middle and at the end.

    Short sequences come first: cheap steps to learn the bytes, then long ones for the attention. ``do`` is from the
    mean loss of one sequence.
    """
    from examples.train_gpt import GPT, StdlibBytes

    def batches(length: int, size: int, count: int) -> Iterator[Tensor]:
        data = StdlibBytes(length, size, train_sequences=max(count, 1) * size)
        data.setup("fit")
        yield from data.train_dataloader()

    found = {}
    short = steps * 6 // 10
    with torch.random.fork_rng(devices=[]), _bf16_training():
        torch.manual_seed(0)
        model = GPT(width=width, depth=depth, heads=heads)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        long_ones, probe = batches(length, 2, steps - short), next(batches(length, 1, 1))
        short_ones = batches(length // 4, 8, short)
        for step in range(steps):
            rate = min((step + 1) / 50, 0.51 + 0.49 * math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = 1e-3 * rate
            loss = model.loss(next(short_ones if step < short else long_ones))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 25 == 0:
                say(f"step {step}: loss {loss.item():.3f}")
            if step + 1 in (steps // 2, steps):
                found[step + 1] = _layers(lambda: model.loss(probe))
                optimizer.zero_grad()
    return found


def _layers(loss: Callable[[], Tensor]) -> list[Inputs]:
    """The arguments of each call of attention in ``loss``, and the gradient of its output."""
    calls: list[tuple[Tensor, ...]] = []
    original = F.scaled_dot_product_attention

    def kept(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = original(q, k, v, **options)
        out.retain_grad()
        calls.append((q, k, v, out))
        return out

    with patch.object(F, "scaled_dot_product_attention", kept):
        loss().backward()
    return [_bfloat16(q.detach(), k.detach(), v.detach(), out.grad) for q, k, v, out in calls]


@contextmanager
def _bf16_training() -> Iterator[None]:
    """Products in BF16, as in training; several times as fast on a processor with BF16."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _bfloat16(*tensors: Tensor | None) -> Inputs:
    return Inputs(*(tensor.bfloat16().contiguous() for tensor in tensors if tensor is not None))


def _normal(count: int, heads: int, length: int, channels: int, seed: int) -> list[Tensor]:
    shape = count, 1, heads, length, channels
    return list(torch.randn(shape, generator=_generator(seed), dtype=torch.float32).unbind())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
