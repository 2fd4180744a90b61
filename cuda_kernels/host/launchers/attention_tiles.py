"""Which tiles attention's blocks visit: tables made of lengths and a band, for any layout of a batch.

:mod:`cuda_kernels.attention.spec` says what packed rows are, and names the fields of the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.spec import NO_LIMIT, ROWS


class PackedRows(NamedTuple):
    """The sequences of a batch: where their rows are in a tensor and in packed rows. Integers ``[B]`` on the host.

    Attributes:
        lengths: rows of each sequence.
        held: rows of the tensor that are kept for it: its own, and padding.
        first: the first of them, counted from the sequence's beginning in a padded batch, from the tensor's where
            sequences lie one after the other.
        starts: its first packed row, a multiple of 128.
        total: packed rows in all, a multiple of 128.
    """

    lengths: Tensor
    held: Tensor
    first: Tensor
    starts: Tensor
    total: int


def padded_rows(batch: int, rows: int, lengths: Tensor | None = None) -> PackedRows:
    """Of ``[B, H, L, D]`` in any order of strides: each sequence has ``rows``, of which ``lengths`` count."""
    held = torch.full((batch,), rows)
    own = held if lengths is None else lengths.cpu().long()
    each = -(-rows // ROWS) * ROWS
    return PackedRows(own, held, torch.zeros_like(held), torch.arange(batch) * each, batch * each)


def ragged_rows(cu_seqlens: Tensor) -> PackedRows:
    """Of ``[T, H, D]``: sequence ``b`` has the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.

    Its packed rows begin with block ``cu_seqlens[b] // 128 + b`` of ``T // 128 + B``, room for every choice of lengths,
    so that shapes follow from T and B. Blocks between two sequences, at most one, belong to nobody.
    """
    bounds = cu_seqlens.cpu().long()
    lengths, sequences = bounds[1:] - bounds[:-1], len(bounds) - 1
    starts = (bounds[:-1] // ROWS + torch.arange(sequences)) * ROWS
    return PackedRows(lengths, lengths, bounds[:-1], starts, (int(bounds[-1]) // ROWS + sequences) * ROWS)


def cast_table(rows: PackedRows) -> Tensor:
    """Blocks of rows to be cast: int32 ``[blocks, 4]``, of ``ROW_FIELDS``."""
    sequence, start = _tiles(rows)
    valid = (rows.lengths[sequence] - start).clamp(0, ROWS)
    return _table(sequence, rows.first[sequence] + start, valid, rows.starts[sequence] + start)


def sequence_table(rows: PackedRows) -> Tensor:
    """Each sequence's first block of 128 packed rows and its length: int32 ``[B, 2]``."""
    return _table(rows.starts // ROWS, rows.lengths)


def tile_table(
    rows: PackedRows,
    others: PackedRows,
    left: int | None,
    right: int | None,
    bottom_right: bool,
    tile: int = ROWS,
) -> Tensor:
    """Tiles of 128 rows of queries with the tiles of keys that they see: int32 ``[tiles, 12]``, of ``TILE_FIELDS``.

    Those with most to do come first. Query i sees the keys ``i + shift - left`` to ``i + shift + right``, all of them
    on a side without a limit; ``shift`` is 0, or with ``bottom_right`` what keys are more than queries. For keys and
    the queries that see them exchange ``rows`` with ``others`` and ``left`` with ``right``.

    Args:
        tile: rows of a tile of the others.
    """
    sequence, start = _tiles(rows)
    count = others.lengths[sequence]
    valid = (rows.lengths[sequence] - start).clamp(0, ROWS)
    shift = count - rows.lengths[sequence] if bottom_right else torch.zeros_like(count)
    low, high = limits(left, right)
    diagonal = start + shift
    first_seen = (diagonal - low).clamp(min=0)
    last_seen = torch.minimum(diagonal + valid - 1 + high, count - 1)
    some = (valid > 0) & (first_seen <= last_seen)
    first = torch.where(some, first_seen // tile, 0)
    last = torch.where(some, last_seen // tile + 1, 0)
    # What all of the tile's rows see lies between what its last one sees first and its first one sees last.
    from_all = (diagonal + valid - 1 - low).clamp(min=0)
    to_all = torch.minimum(diagonal + high, count - 1) + 1
    whole_first = torch.minimum(_rounded_up(from_all, tile) // tile, last)
    whole_last = torch.maximum(to_all.clamp(min=0) // tile, whole_first)
    table = _table(
        rows.starts[sequence] + start, others.starts[sequence], first, last, whole_first, whole_last,
        count, diagonal, valid, sequence, rows.first[sequence] + start,
        (rows.held[sequence] - start).clamp(0, ROWS),
    )  # fmt: skip
    return table[torch.argsort(last - first, descending=True, stable=True)]


def limits(left: int | None, right: int | None) -> tuple[int, int]:
    """A band's limits as kernels take them."""
    low, high = (NO_LIMIT if limit is None else min(limit, NO_LIMIT) for limit in (left, right))
    return low, high


def _tiles(rows: PackedRows) -> tuple[Tensor, Tensor]:
    """The sequence of each tile of 128 rows, and its first row there; padding that is held has tiles, too."""
    counts = _rounded_up(rows.held, ROWS) // ROWS
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    before = counts.cumsum(0) - counts
    return sequence, (torch.arange(len(sequence)) - before[sequence]) * ROWS


def _rounded_up(x: Tensor, multiple: int) -> Tensor:
    return (x + multiple - 1) // multiple * multiple


def _table(*columns: Tensor) -> Tensor:
    return torch.stack(columns, 1).to(torch.int32)
