"""Tables of the tiles that attention's blocks process, from lengths and a band, for any layout of a batch.

All tables of a batch, for both passes, are in one tensor that several calls can share.

See :mod:`cuda_kernels.attention.spec` for packed rows and the fields of the tables. The sizes of all tables follow from
shapes, an entry per 128 packed rows. Values are computed on the device of the lengths, without synchronization.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.backward.memory import QUERIES
from cuda_kernels.attention.spec import NO_LIMIT, ROW_FIELDS, ROWS, SEQUENCE_FIELDS, TILE_FIELDS
from cuda_kernels.device.sizes import ceil_div


class RowSpace(NamedTuple):
    """The packed rows of a batch as far as shapes determine them, without the sequences' lengths.

    Attributes:
        sequences: number of sequences in the batch.
        length_or_total: rows of each sequence in a padded batch; rows of the tensor if sequences are concatenated.
        ragged: whether sequences are concatenated.
    """

    sequences: int
    length_or_total: int
    ragged: bool

    @property
    def blocks(self) -> int:
        """Blocks of 128 packed rows; for ragged sequences enough for any lengths."""
        if self.ragged:
            return self.length_or_total // ROWS + self.sequences
        return self.sequences * ceil_div(self.length_or_total, ROWS)

    @property
    def total(self) -> int:
        """Number of packed rows."""
        return self.blocks * ROWS


class PackedRows(NamedTuple):
    """The sequences of a batch: their rows in a tensor and in packed rows; int64 on one device.

    Attributes:
        space: the packed rows.
        lengths: rows of each sequence ``[B]``.
        held: rows of the tensor for each sequence ``[B]``, including padding.
        first_row: the first of them ``[B]``: 0 in a padded batch, the tensor's row if sequences are concatenated.
        starts: first packed row of each sequence ``[B]``, a multiple of 128.
        sequence: the sequence of each block of 128 packed rows, ``[R / 128]``.
        row: the block's first row in its sequence; if it is at least ``held``, the block is unused.
    """

    space: RowSpace
    lengths: Tensor
    held: Tensor
    first_row: Tensor
    starts: Tensor
    sequence: Tensor
    row: Tensor


class Visible(NamedTuple):
    """The keys that a query attends to: query i to keys ``i + shift - left`` to ``i + shift + right``.

    Without a limit, to all on that side. ``shift`` is 0, or with ``bottom_right`` the number of keys minus that of
    queries.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def transposed(self) -> Visible:
        """The queries that attend to a key."""
        return Visible(self.right, self.left, self.bottom_right)

    def tiles_of_queries(self, queries: PackedRows, keys: PackedRows) -> Tensor:
        """Tiles of 128 queries with the tiles of 128 keys they attend to."""
        return tile_table(queries, keys, self)

    def tiles_of_keys(self, keys: PackedRows, queries: PackedRows) -> Tensor:
        """Tiles of 128 keys with the tiles of 64 queries that attend to them."""
        return tile_table(keys, queries, self.transposed(), QUERIES)

    def limits(self) -> dict[str, int]:
        """The limits as kernel parameters, by name."""
        both = {"left": self.left, "right": self.right}
        return {name: NO_LIMIT if limit is None else min(limit, NO_LIMIT) for name, limit in both.items()}

    def most_seen(self, others: RowSpace, longest: int | None = None) -> int:
        """Upper bound, from shapes, of the rows in the blocks of 128 others that a tile's rows attend to.

        ``longest``: upper bound of the others' lengths.
        """
        blocks = ceil_div(others.length_or_total if longest is None else min(longest, others.length_or_total), ROWS)
        if self.left is not None and self.right is not None:
            span = self.left + ROWS + self.right
            blocks = min(blocks, ceil_div(span - 1, ROWS) + 1)
        return blocks * ROWS


class CastTables(NamedTuple):
    """Locations of the sequences of a batch, for casts.

    Attributes:
        blocks: :func:`cast_table`.
        summed, counts: :func:`mean_tables`, if a cast is centered.
    """

    blocks: Tensor
    summed: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedRows, mean_rows: int | None = None) -> CastTables:
        """The tables of a cast that is centered by the mean of each sequence's first ``mean_rows`` rows, or of all."""
        blocks = cast_table(packed)
        return cls(blocks, *mean_tables(packed, blocks, mean_rows))


class BatchTables(NamedTuple):
    """The tables that attention's kernels read about a batch's lengths.

    Attributes:
        queries, keys: the tables for the casts of queries, and of keys and values.
        tiles_of_queries: tiles of 128 queries with the tiles of 128 keys they attend to.
        tiles_of_keys: tiles of 128 keys with the tiles of 64 queries that attend to them; None for a forward pass.
    """

    queries: CastTables
    keys: CastTables
    tiles_of_queries: Tensor
    tiles_of_keys: Tensor | None

    @classmethod
    def of(
        cls, queries: PackedRows, keys: PackedRows, visible: Visible, mean_rows: int | None, backward: bool = True
    ) -> BatchTables:
        """The tables of a batch under a mask; ``mean_rows``: of keys, see :meth:`CastTables.of`."""
        tiles_of_keys = visible.tiles_of_keys(keys, queries) if backward else None
        casts = CastTables(cast_table(queries)), CastTables.of(keys, mean_rows)
        return cls(*casts, visible.tiles_of_queries(queries, keys), tiles_of_keys)

    def joined(self) -> Tensor:
        """The tables concatenated: int32, in the order of :meth:`split`, with :func:`joined_numel` elements."""
        tables = self.tiles_of_queries, self.tiles_of_keys, self.queries.blocks, *self.keys
        return torch.cat([table.flatten() for table in tables if table is not None])

    @classmethod
    def split(cls, joined: Tensor, queries: RowSpace, keys: RowSpace, mean_rows: int | None) -> BatchTables:
        """The inverse of :meth:`joined`, as views."""
        shapes = _shapes(queries, keys, mean_rows)
        parts = joined.split([rows * fields for rows, fields in shapes])
        of_queries, of_keys, queries_cast, *keys_cast = (part.view(shape) for part, shape in zip(parts, shapes))
        return cls(CastTables(queries_cast), CastTables(*keys_cast), of_queries, of_keys)


def packed_rows(space: RowSpace, cu_seqlens: Tensor | None, device: torch.device) -> PackedRows:
    """The rows of a batch, on the device of ``cu_seqlens`` if it is given.

    In a padded batch, ``[B, H, L, D]`` with any order of strides, each sequence has ``space.length_or_total`` rows; its
    length is the difference in ``cu_seqlens [B + 1]``. In ``[T, H, D]``, sequence ``b`` has the rows from
    ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``, and its packed rows start at block ``cu_seqlens[b] // 128 + b``; rows
    after the last sequence are its padding. Blocks between two sequences, at most one each, are unused.

    Invalid starts, which do not rise from 0 to at most the tensor's rows, are clamped, so that no memory outside the
    tensor is accessed.
    """
    device = device if cu_seqlens is None else cu_seqlens.device
    index = torch.arange(space.sequences, device=device)
    if space.ragged:
        assert cu_seqlens is not None
        ends = cu_seqlens[1:].long().clamp(0, space.length_or_total)
        bounds = torch.cat([ends.new_zeros(1), ends]).cummax(0).values
        lengths, first_row = bounds.diff(), bounds[:-1]
        held = torch.where(index < space.sequences - 1, lengths, space.length_or_total - first_row)
        starts = first_row // ROWS + index
    else:
        held = torch.full_like(index, space.length_or_total)
        lengths = held if cu_seqlens is None else cu_seqlens.long().diff().clamp(0, space.length_or_total)
        first_row, starts = torch.zeros_like(index), index * ceil_div(space.length_or_total, ROWS)
    block = torch.arange(space.blocks, device=device)
    sequence = torch.searchsorted(starts, block, right=True) - 1
    return PackedRows(space, lengths, held, first_row, starts * ROWS, sequence, (block - starts[sequence]) * ROWS)


def cast_table(packed: PackedRows) -> Tensor:
    """Blocks of rows to cast: int32 ``[R / 128, 4]``, see ``ROW_FIELDS``."""
    valid = (packed.lengths[packed.sequence] - packed.row).clamp(0, ROWS)
    source_row = packed.first_row[packed.sequence] + packed.row
    return _table(ROW_FIELDS, sequence=packed.sequence, source_row=source_row, valid=valid, row=_block_rows(packed))


def mean_tables(packed: PackedRows, blocks: Tensor, mean_rows: int | None) -> tuple[Tensor, Tensor]:
    """Tables for the mean of each sequence's first ``mean_rows`` rows, at most 128; None averages all rows.

    Args:
        packed: the rows of the batch.
        blocks: :func:`cast_table` of ``packed``.
        mean_rows: see above.

    Returns:
        Blocks of rows, like ``blocks``: int32 ``[R / 128, 4]`` or ``[B, 4]``; and each sequence's first block of 128
        packed rows with the number of rows to average: int32 ``[B, 2]``.
    """
    starts = packed.starts // ROWS
    if mean_rows is None:
        return blocks, _table(SEQUENCE_FIELDS, block=starts, rows=packed.lengths)
    assert mean_rows <= ROWS
    counts = packed.lengths.clamp(max=mean_rows)
    sequence = torch.arange(packed.space.sequences, device=starts.device)
    summed = _table(ROW_FIELDS, sequence=sequence, source_row=packed.first_row, valid=counts, row=packed.starts)
    return summed, _table(SEQUENCE_FIELDS, block=starts, rows=counts)


def tile_table(packed: PackedRows, others: PackedRows, visible: Visible, tile_size: int = ROWS) -> Tensor:
    """Tiles of 128 rows of queries with the tiles of keys they attend to: int32 ``[R / 128, 12]``, see ``TILE_FIELDS``.

    Those with the most work come first. For keys and the queries that attend to them, exchange ``packed`` and
    ``others``, and transpose ``visible``.

    Args:
        packed: rows of the queries.
        others: rows of the keys.
        visible: the band.
        tile_size: rows of a tile of ``others``.
    """
    sequence, start = packed.sequence, packed.row
    count, length = others.lengths[sequence], packed.lengths[sequence]
    valid = (length - start).clamp(0, ROWS)
    low, high = visible.limits().values()
    diagonal = start + count - length if visible.bottom_right else start
    first_seen = (diagonal - low).clamp(min=0)
    last_seen = torch.minimum(diagonal + valid - 1 + high, count - 1)
    some = (valid > 0) & (first_seen <= last_seen)
    first_tile = torch.where(some, first_seen // tile_size, 0)
    last_tile = torch.where(some, last_seen // tile_size + 1, 0)
    # All rows see the range from the first key seen by the tile's last row to the last key seen by its first row.
    from_all = (diagonal + valid - 1 - low).clamp(min=0)
    to_all = torch.minimum(diagonal + high, count - 1) + 1
    whole_first = torch.minimum((from_all + tile_size - 1) // tile_size, last_tile)
    whole_last = torch.maximum(to_all.clamp(min=0) // tile_size, whole_first)
    table = _table(
        TILE_FIELDS,
        row=_block_rows(packed),
        others=others.starts[sequence],
        first=first_tile,
        last=last_tile,
        whole_first=whole_first,
        whole_last=whole_last,
        count=count,
        diagonal=diagonal,
        valid=valid,
        sequence=sequence,
        out_row=packed.first_row[sequence] + start,
        out_rows=(packed.held[sequence] - start).clamp(0, ROWS),
    )
    return table[torch.argsort(last_tile - first_tile, descending=True, stable=True)]


def joined_numel(queries: RowSpace, keys: RowSpace, mean_rows: int | None) -> int:
    """Number of elements of :meth:`BatchTables.joined`."""
    return sum(rows * fields for rows, fields in _shapes(queries, keys, mean_rows))


def _shapes(queries: RowSpace, keys: RowSpace, mean_rows: int | None) -> list[tuple[int, int]]:
    """Shapes of the tables in order. Entries of 16 bytes and more come first, because kernels load them at once."""
    fields, of_tile, of_sequence = len(ROW_FIELDS), len(TILE_FIELDS), len(SEQUENCE_FIELDS)
    summed = keys.blocks if mean_rows is None else keys.sequences
    return [
        (queries.blocks, of_tile), (keys.blocks, of_tile),
        (queries.blocks, fields),
        (keys.blocks, fields), (summed, fields), (keys.sequences, of_sequence),
    ]  # fmt: skip


def _block_rows(packed: PackedRows) -> Tensor:
    """The first packed row of each block."""
    return torch.arange(packed.space.blocks, device=packed.row.device) * ROWS


def _table(fields: tuple[str, ...], **columns: Tensor) -> Tensor:
    """int32 ``[entries, fields]``; the columns' names are ``fields``, which kernels access by position."""
    assert tuple(columns) == fields
    return torch.stack(tuple(columns.values()), 1).to(torch.int32)
