"""All tables of a batch, for both passes, in one tensor that several calls can share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cuda_kernels.attention.host.forward import CastTables, Visible
from cuda_kernels.attention.host.tiles import PackedRows, RowSpace, cast_table
from cuda_kernels.attention.spec import ROW_FIELDS, SEQUENCE_FIELDS, TILE_FIELDS


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
