"""Conversions between Transformer Engine's formats, ``[B, H, L, D]`` as in the specification, and packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_kernels.attention.host.tiles import RowSpace, packed_rows
from lightning_fp8.attention.ops.casts import BLOCK, Codes

FORMATS = ("sbhd", "bshd", "thd")


def to_heads(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``[B, H, L, D]`` of a tensor in ``qkv_format``, and the sequences' lengths ``[B]``; None if all are ``L``.

    Raises:
        ValueError: If ``cu_seqlens`` is missing for ``thd``, or does not rise from 0 to at most the number of the
            tensor's rows.
    """
    if qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("qkv_format='thd' needs cu_seqlens, where each sequence starts; pass integers [B + 1]")
        return unpack(x, cu_seqlens)
    heads = x.transpose(1, 2) if qkv_format == "bshd" else x.permute(1, 2, 0, 3)
    return heads, None if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1]


def from_heads(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None, rows: int | None = None) -> Tensor:
    """``[B, H, L, D]`` to ``qkv_format``, contiguous; ``rows``: T in ``thd``, see :func:`pack`."""
    if qkv_format == "thd":
        assert cu_seqlens is not None
        return pack(x, cu_seqlens, rows)
    return (x.transpose(1, 2) if qkv_format == "bshd" else x.permute(2, 0, 1, 3)).contiguous()


def unpack(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` to a padded ``[B, H, L, D]`` and the lengths ``[B]``; padding is 0.

    Args:
        cu_seqlens: integers ``[B + 1]``, where each sequence starts; the first is 0, the last is the end of the last
            sequence. Later rows of ``x`` are padding and left out. Sequences may be empty.

    Raises:
        ValueError: If ``cu_seqlens`` does not rise from 0 to at most T.
    """
    starts, lengths = _starts_and_lengths(cu_seqlens, len(x))
    places = _Places(starts, lengths, max(lengths.tolist(), default=0))
    return places.unpack(x.transpose(0, 1), 0), lengths


def pack(x: Tensor, cu_seqlens: Tensor, rows: int | None = None) -> Tensor:
    """The inverse of :func:`unpack`: ``[B, H, L, D]`` to ``[T, H, D]``, or ``[B, H, L]`` to ``[T, H]``.

    ``rows`` is T; rows after the last sequence are 0. None is the end of the last sequence.
    """
    rows = int(cu_seqlens[-1]) if rows is None else rows
    places = _Places(*_starts_and_lengths(cu_seqlens, rows), x.shape[2])
    return places.pack(x, rows, 0).transpose(0, 1).contiguous()


def _starts_and_lengths(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    starts = cu_seqlens.cpu().long()
    lengths = starts[1:] - starts[:-1]
    if len(starts) == 0 or starts[0] != 0 or starts[-1] > rows or (lengths < 0).any():
        raise ValueError(f"cu_seqlens={starts.tolist()} does not rise from 0 to at most the tensor's {rows} rows")
    return starts[:-1], lengths


def row_space(x: Tensor, qkv_format: str, cu_seqlens: Tensor | None, rows: int | None = None) -> RowSpace:
    """The packed rows of a tensor in ``qkv_format``; with ``rows``, of a tensor like ``x`` with that many rows."""
    if qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("qkv_format='thd' needs cu_seqlens, where each sequence starts; pass integers [B + 1]")
        return RowSpace(cu_seqlens.shape[0] - 1, x.shape[0] if rows is None else rows, True)
    length, batch = (1, 0) if qkv_format == "bshd" else (0, 1)
    return RowSpace(x.shape[batch], x.shape[length] if rows is None else rows, False)


class Packing:
    """``[B, H, L, ...]`` of a tensor in a format to packed rows, as in :class:`Kept`, and back."""

    def __init__(self, x: Tensor, qkv_format: str, cu_seqlens: Tensor | None, rows: int | None = None) -> None:
        packed = packed_rows(row_space(x, qkv_format, cu_seqlens, rows), cu_seqlens, x.device)
        self._space = packed.space
        self._longest = max(packed.lengths.tolist(), default=0) if packed.space.ragged else packed.space.length_or_total
        self._rows = _Places(packed.starts, packed.lengths, self._longest)
        blocks = -(-packed.lengths // BLOCK)
        self._blocks = _Places(packed.starts // BLOCK, blocks, -(-self._longest // BLOCK))

    def pack(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """``[B, H, L]`` to ``[H, R]``; unused rows are ``padding``."""
        return self._rows.pack(x, self._space.total, padding)

    def unpack(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """``[H, R]`` to ``[B, H, L]``."""
        return self._rows.unpack(x, padding)

    def pack_codes(self, codes: Codes) -> Codes:
        """``[B, H, L, D]`` to ``[H, R, D]``, ``[B, H, ceil(L / 128)]`` to ``[H, R / 128]``."""
        data = self._rows.pack(codes.data.view(torch.uint8), self._space.total, 0)
        return Codes(data.view(codes.data.dtype), self._blocks.pack(codes.scale_inv, self._space.blocks, 1))

    def unpack_codes(self, data: Tensor, scale_inv: Tensor) -> Codes:
        """The inverse of :meth:`pack_codes`."""
        codes = self._rows.unpack(data.view(torch.uint8), 0)
        return Codes(codes.view(data.dtype), self._blocks.unpack(scale_inv, 1))


class _Places:
    """Index of items in a packed dimension: ``counts [B]`` (at most ``most``) per sequence, from ``starts [B]``."""

    def __init__(self, starts: Tensor, counts: Tensor, most: int) -> None:
        index = torch.arange(most, device=starts.device)
        self._inside = index < counts[:, None]
        self._places = (starts[:, None] + index)[self._inside]

    def pack(self, x: Tensor, total: int, padding: float) -> Tensor:
        out = x.new_full((x.shape[1], total, *x.shape[3:]), padding)
        out[:, self._places] = x.transpose(0, 1)[:, self._inside]
        return out

    def unpack(self, x: Tensor, padding: float) -> Tensor:
        out = x.new_full((x.shape[0], *self._inside.shape, *x.shape[2:]), padding)
        out[:, self._inside] = x[:, self._places]
        return out.transpose(0, 1).contiguous()
