"""The order in which a call's tiles are visited, and its heads grouped for the products."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_fp8.attention.ops.casts import BLOCK, Codes
from lightning_fp8.attention.ops.masks import Band, Lengths, hidden, seeing, seen

KEYS = 128
"""Keys of a tile in the forward pass and for dQ; with tiles of 128 queries, fully masked tiles are skipped."""
QUERIES = 64
"""Queries of a tile for dK and dV, with 128 keys."""
ROWS = 128
"""Rows of a tile's result in each pass."""

LOG2_E = math.log2(math.e)


class TiledCall:
    """Shapes, scale and mask of one call of attention.

    Attributes:
        c: the softmax scale times log2(e).
        group: number of query heads that share a head of keys and values.

    Raises:
        ValueError: If the number of query heads is not divisible, or if lengths have another batch size or exceed the
            rows.
    """

    def __init__(self, q: Codes, k: Codes, softmax_scale: float, band: Band, lengths: Lengths | None) -> None:
        self.batch, self.heads, self.queries_in_all, _ = q.data.shape
        self.shared_heads, self.keys_in_all = k.data.shape[1:3]
        if self.heads % max(self.shared_heads, 1) or (self.heads and not self.shared_heads):
            raise ValueError(
                f"{self.heads} query heads cannot share {self.shared_heads} heads of keys and values evenly"
            )
        self.group = self.heads // max(self.shared_heads, 1)
        self.softmax_scale, self.c, self.band = softmax_scale, softmax_scale * LOG2_E, band
        held = torch.tensor([[self.queries_in_all], [self.keys_in_all]], device="cpu")
        self.lengths = Lengths(*held) if lengths is None else Lengths(*(x.cpu().long() for x in lengths))
        for name, length, most in zip(Lengths._fields, self.lengths, held):
            if lengths is not None and length.shape != (self.batch,):
                raise ValueError(f"{len(length)} lengths of {name} for a batch of {self.batch} sequences")
            if ((length < 0) | (length > most)).any():
                raise ValueError(f"lengths of {name} {length.tolist()} are not 0 to {int(most)}, the tensor's rows")
        self.padded = any(bool((length != most).any()) for length, most in zip(self.lengths, held))

    def grouped(self, x: Tensor) -> Tensor:
        """``[B, H, ...]`` to ``[N, G, ...]``; N is the number of heads of keys and values in the whole batch."""
        return x.reshape(self.batch * self.shared_heads, self.group, *x.shape[2:])

    def apart(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`grouped`."""
        return x.reshape(self.batch, self.heads, *x.shape[2:])

    def tiles_of_keys(self) -> Iterator[tuple[int, slice, slice]]:
        """``block, query_slice, key_slice`` for each visible tile of keys: its block of scales, and its queries."""
        for key_slice in _tiles(self.keys_in_all, KEYS):
            query_slice = seeing(self.band, key_slice, self.lengths, ROWS)
            if query_slice.start < query_slice.stop:
                yield key_slice.start // BLOCK, query_slice, key_slice

    def tiles_of_queries(self) -> Iterator[tuple[int, slice, slice]]:
        """``block, query_slice, key_slice`` for each tile of queries: its block of scales, and its keys."""
        for query_slice in _tiles(self.queries_in_all, QUERIES):
            key_slice = seen(self.band, query_slice, self.lengths, ROWS)
            if key_slice.start < key_slice.stop:
                yield query_slice.start // BLOCK, query_slice, key_slice

    def hide(self, scores: Tensor, query_slice: slice, key_slice: slice) -> None:
        """Set ``scores [N, G, queries, keys]`` to -inf where a query does not attend to a key."""
        mask = hidden(self.band, query_slice, key_slice, self.lengths, self.padded)
        if mask is not None:
            apart = scores.unflatten(0, (self.batch, self.shared_heads)) if len(mask) > 1 else scores[:, None]
            apart.masked_fill_(mask[:, None, None].to(scores.device), -torch.inf)


def _tiles(num_rows: int, size: int) -> Iterator[slice]:
    """``num_rows`` in tiles of ``size``; the last may be shorter."""
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
