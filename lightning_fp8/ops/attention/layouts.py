"""From Transformer Engine's formats to heads side by side, in which attention is specified, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fp8.ops.attention.casts import BLOCK, Codes
from lightning_fp8.ops.attention.packed import pack, unpack


def to_heads(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``[B, H, L, D]`` of a tensor in ``qkv_format``, and the sequences' lengths ``[B]``; None where all are ``L``.

    Raises:
        ValueError: ``thd`` without ``cu_seqlens``, or one that does not rise from 0 to at most the tensor's rows.
    """
    if qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("qkv_format='thd' needs cu_seqlens, where each sequence starts; pass integers [B + 1]")
        return unpack(x, cu_seqlens)
    heads = x.transpose(1, 2) if qkv_format == "bshd" else x.permute(1, 2, 0, 3)
    return heads, None if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1]


def from_heads(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None, rows: int | None = None) -> Tensor:
    """``[B, H, L, D]`` in ``qkv_format``, contiguous; of ``thd`` with so many ``rows``, see :func:`pack`."""
    if qkv_format == "thd":
        assert cu_seqlens is not None
        return pack(x, cu_seqlens, rows)
    return (x.transpose(1, 2) if qkv_format == "bshd" else x.permute(2, 0, 1, 3)).contiguous()


def pack_codes(codes: Codes, cu_seqlens: Tensor, rows: int) -> Codes:
    """Codes of padded sequences in T ``rows``, without the padding: ``[T, H, D]`` and ``[T // 128 + B, H]``."""
    data = pack(codes.data.view(torch.uint8), cu_seqlens, rows).view(codes.data.dtype)
    places, is_block = _places_of_blocks(cu_seqlens, codes.scale_inv.shape[2])
    scale_inv = codes.scale_inv.new_ones(len(data) // BLOCK + len(cu_seqlens) - 1, codes.scale_inv.shape[1])
    scale_inv[places[is_block]] = codes.scale_inv.transpose(1, 2)[is_block]
    return Codes(data, scale_inv)


def unpack_codes(codes: Codes, cu_seqlens: Tensor) -> Codes:
    """The way back from :func:`pack_codes`."""
    data, lengths = unpack(codes.data.view(torch.uint8), cu_seqlens)
    places, is_block = _places_of_blocks(cu_seqlens, -(-data.shape[2] // BLOCK))
    scale_inv = codes.scale_inv.new_ones(len(lengths), places.shape[1], codes.scale_inv.shape[1])
    scale_inv[is_block] = codes.scale_inv[places[is_block]]
    return Codes(data.view(codes.data.dtype), scale_inv.transpose(1, 2))


def unpack_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``[T, H]`` to ``[B, H, L]``."""
    return unpack(x[..., None], cu_seqlens)[0].squeeze(3)


def _places_of_blocks(cu_seqlens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Where each sequence's blocks of scales lie, and which of its ``most`` it has: ``[B, most]``."""
    starts = cu_seqlens.cpu().long()
    block = torch.arange(most, device="cpu")
    places = (starts[:-1] // BLOCK + torch.arange(len(starts) - 1, device="cpu"))[:, None] + block
    return places, block < -(-(starts[1:] - starts[:-1])[:, None] // BLOCK)
