"""Mask geometry: the keys that a query attends to, and fully masked tiles, which are skipped.

Every mask that is supported in FP8 is a band around a diagonal, limited by the sequences' lengths. Windows have the
names and meaning that FlashAttention and Transformer Engine give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Query ``i`` attends to key ``j`` if ``i + shift - left <= j <= i + shift + right``.

    Attributes:
        left: number of keys before the diagonal; None is unlimited.
        right: number of keys after the diagonal; 0 is causal, None is unlimited.
        bottom_right: if True, the diagonal ends at the last query and the last key of each sequence,
            ``shift = keys - queries``; if False, it starts at the first ones, ``shift = 0``.

    Raises:
        ValueError: If a limit is negative.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def __post_init__(self) -> None:
        for name, limit in (("left", self.left), ("right", self.right)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name}={limit} is negative; pass None for no limit, 0 for none beyond the diagonal")

    @property
    def limited(self) -> bool:
        return self.left is not None or self.right is not None

    def transposed(self) -> Band:
        """The band with queries and keys exchanged."""
        return Band(self.right, self.left, self.bottom_right)


class Lengths(NamedTuple):
    """Lengths of the sequences in a padded batch: integers ``[B]`` on the host, of queries and of keys."""

    queries: Tensor
    keys: Tensor

    def transposed(self) -> Lengths:
        return Lengths(self.keys, self.queries)


def seeing(band: Band, key_slice: slice, lengths: Lengths, tile_size: int) -> slice:
    """The range of queries that attend to keys of ``key_slice``, rounded out to tiles of ``tile_size``.

    A tile is included if any sequence of the batch needs it. The range ends at the longest sequence's end.
    """
    starts, stops = [], []
    for num_queries, num_keys in zip(lengths.queries.tolist(), lengths.keys.tolist()):
        stop, shift = min(key_slice.stop, num_keys), num_keys - num_queries if band.bottom_right else 0
        low = 0 if band.right is None else max(0, key_slice.start - shift - band.right)
        high = num_queries if band.left is None else min(num_queries, stop - shift + band.left)
        if key_slice.start < stop and low < high:
            starts.append(low // tile_size * tile_size)
            stops.append(min(-(-high // tile_size) * tile_size, int(lengths.queries.max())))
    return slice(min(starts, default=0), max(stops, default=0))


def seen(band: Band, query_slice: slice, lengths: Lengths, tile_size: int) -> slice:
    """The range of keys that queries of ``query_slice`` attend to, rounded out to tiles of ``tile_size``."""
    return seeing(band.transposed(), query_slice, lengths.transposed(), tile_size)


def hidden(band: Band, query_slice: slice, key_slice: slice, lengths: Lengths, padded: bool) -> Tensor | None:
    """True where a query does not attend to a key: ``[B, queries, keys]``, B of ``lengths``; None if nothing is masked.

    ``padded``: whether some sequence is shorter than the tensor.
    """
    if not band.limited and not padded:
        return None
    queries_of, keys_of = lengths.queries[:, None, None], lengths.keys[:, None, None]
    i = torch.arange(query_slice.start, query_slice.stop, device=queries_of.device)[:, None]
    j = torch.arange(key_slice.start, key_slice.stop, device=keys_of.device)
    is_hidden = (i >= queries_of) | (j >= keys_of)
    offset = j - i - (keys_of - queries_of if band.bottom_right else 0)
    if band.left is not None:
        is_hidden = is_hidden | (offset < -band.left)
    if band.right is not None:
        is_hidden = is_hidden | (offset > band.right)
    return is_hidden
