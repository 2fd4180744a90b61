"""Sequences for DotProductAttention: drawn one by one, laid out in each format, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fp8.attention.ops import Band
from tests.attention.ops.attention_cases import exact, visible_keys

MASKS = {
    "no_mask": Band(),
    "padding": Band(),
    "causal": Band(right=0),
    "padding_causal": Band(right=0),
    "causal_bottom_right": Band(right=0, bottom_right=True),
    "padding_causal_bottom_right": Band(right=0, bottom_right=True),
}
"""What each of Transformer Engine's mask types means."""

RAGGED = [(70, 70), (1, 1), (0, 0), (130, 200), (40, 129)]
EVEN = [(100, 140), (100, 140)]


class Batch(NamedTuple):
    """For each sequence ``[L, H, D]``."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    do: list[Tensor]


def drawn_batch(
    lengths: Sequence[tuple[int, int]], heads: int, groups: int, channels: int, dtype: torch.dtype = torch.bfloat16
) -> Batch:
    def normal(rows: int, of: int) -> Tensor:
        return torch.randn(rows, of, channels).to(dtype)

    rows = [(normal(q, heads), normal(k, groups), normal(k, groups), normal(q, heads)) for q, k in lengths]
    return Batch(*map(list, zip(*rows)))


def laid_out(sequences: list[Tensor], qkv_format: str, between: float = 1e4) -> Tensor:
    """One tensor in the format; padding holds ``between``."""
    if qkv_format == "thd":
        return torch.cat(sequences)
    longest = max(map(len, sequences))
    batch = sequences[0].new_full((len(sequences), longest, *sequences[0].shape[1:]), between)
    for row, sequence in zip(batch, sequences):
        row[: len(sequence)] = sequence
    return batch if qkv_format == "bshd" else batch.transpose(0, 1).contiguous()


def taken_apart(x: Tensor, lengths: Sequence[int], qkv_format: str) -> list[Tensor]:
    """The way back."""
    if qkv_format == "thd":
        return list(x.split(list(lengths)))
    batch = x if qkv_format == "bshd" else x.transpose(0, 1)
    return [row[:length] for row, length in zip(batch, lengths)]


def padding_of(x: Tensor, lengths: Sequence[int], qkv_format: str) -> list[Tensor]:
    batch = x if qkv_format == "bshd" else x.transpose(0, 1)
    return [] if qkv_format == "thd" else [row[length:] for row, length in zip(batch, lengths)]


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def of_definition(x: Batch, band: Band) -> list[Tensor]:
    """O, dQ, dK, dV in float64, all sequences' rows one after the other."""
    found: list[list[Tensor]] = [[], [], [], []]
    for sequence in zip(*x):
        q, k, v, do = (each.transpose(0, 1)[None] for each in sequence)
        if not (q.numel() and k.numel()):
            for rows, each in zip(found, (q, q, k, v)):
                rows.append(torch.zeros_like(each[0].transpose(0, 1), dtype=torch.float64))
            continue
        for rows, each in zip(found, exact(q, k, v, do, visible_keys(q.shape[2], k.shape[2], band))):
            rows.append(each[0].transpose(0, 1))
    return [torch.cat(rows) for rows in found]


def run(module: Any, x: Batch, qkv_format: str, between: float = 1e4, **arguments: Any) -> tuple[Tensor, ...]:
    """O, dQ, dK, dV of ``module`` in the format, heads apart."""
    q, k, v, do = (laid_out(each, qkv_format, between) for each in x)
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    o = module(q, k, v, **arguments)
    return (o.unflatten(-1, do.shape[-2:]), *torch.autograd.grad(o, (q, k, v), do.flatten(-2)))
