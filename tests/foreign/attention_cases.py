"""Triton's attention, against its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tests.foreign.case import BF16, E4M3, E5M2, Case, integers
from tests.foreign.compiler import DEFAULT, Argument, Descriptor, Launcher, Options
from tests.foreign.kernels import attention

# Attention


def _attention(kernel: Any, options: Options, dtype: torch.dtype, narrow: Any) -> Callable[[Launcher], None]:
    """Scores are integers from -5 to 5, exponentials powers of two: all is exact up to the last division."""

    def run(launch: Launcher) -> None:
        rows, length, depth, block = 128, 256, 128, 64
        places = torch.rand(rows, depth, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :5]
        q = torch.zeros(rows, depth).scatter_(1, places, 1.0).to(dtype)
        k = integers((length, depth), dtype, 2, 1)
        v, out = integers((length, depth), dtype, 3), torch.zeros(rows, depth)
        args: list[Argument] = [q, k, v, out]
        if kernel is attention.attention:
            transposed = Descriptor(v.T.contiguous(), (depth, block))
            args = [Descriptor(q, (64, depth)), Descriptor(k, (block, depth)), transposed, Descriptor(out, (64, depth))]
        launch(kernel, (2,), [*args, length], options, D=depth, BM=64, BN=block, P=narrow)
        expected = _online_attention(q.double(), k.double(), v.double(), block, dtype)
        torch.testing.assert_close(out.double(), expected, rtol=2**-22, atol=0)

    return run


def _online_attention(q: Tensor, k: Tensor, v: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """softmax(q kᵀ) v in base 2 and float64, P in `dtype` relative to the largest score so far."""
    highest = torch.full((len(q), 1), -torch.inf, dtype=torch.float64)
    total, sums = torch.zeros_like(highest), torch.zeros_like(q)
    for keys, values in zip(k.split(block), v.split(block)):
        scores = q @ keys.T
        higher = torch.maximum(highest, scores.amax(1, keepdim=True))
        p, correction = torch.exp2(scores - higher), torch.exp2(highest - higher)
        total = total * correction + p.sum(1, keepdim=True)
        sums = sums * correction + p.float().to(dtype).double() @ values
        highest = higher
    return sums / total


ATTENTION = [
    Case("attention", "wgmma-e4m3", _attention(attention.attention, DEFAULT, E4M3, tl.float8e4nv)),
    Case("attention", "wgmma-bf16-2stages", _attention(attention.attention, Options(90, 4, 2), BF16, tl.bfloat16)),
    Case("attention", "sm_89-e4m3", _attention(attention.pointer_attention, Options(89), E4M3, tl.float8e4nv)),
    Case("attention", "sm_120-e5m2", _attention(attention.pointer_attention, Options(120), E5M2, tl.float8e5)),
]
