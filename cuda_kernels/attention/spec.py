"""Conventions of attention's kernels: layouts of operands, tables of tiles, and compile-time options.

**Packed rows.** Queries and keys have a row space each: the sequences one after another, each starting at a multiple of
128 rows. Heads are the outermost dimension, so that one two-dimensional tensor map serves every layout of a batch. With
``R`` rows in all, a multiple of 128:

- row copy, uint8 codes ``[H, R, D]``;
- transposed copy, uint8 codes ``[H, D, R]``, with each group of 16 columns in the order :data:`ORDER_A`;
- ``scale_inv``, float32 ``[H, R / 128]``;
- statistics of queries, float32 ``[H, R]``.

Rows between a sequence's end and the next multiple of 128 have code 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuda_kernels.device.sizes import DtypeName

ROWS = 128
"""Rows of a tile, and of a block of scales."""
HEAD_DIMS = (64, 96, 128, 256)
ORDER_A = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""The order of 16 rows in a transposed copy: with it, a thread's registers of an accumulator, packed two by two, are an
8-bit operand A of wgmma."""
NO_LIMIT = 1 << 29
"""A window's limit that no sequence reaches; sums of several of them fit into int32."""

TILE_FIELDS = (
    "row", "others", "first", "last", "whole_first", "whole_last",
    "count", "diagonal", "valid", "sequence", "out_row", "out_rows",
)  # fmt: skip
(
    TILE_ROW, TILE_OTHERS, TILE_FIRST, TILE_LAST, TILE_WHOLE_FIRST, TILE_WHOLE_LAST,
    TILE_COUNT, TILE_DIAGONAL, TILE_VALID, TILE_SEQUENCE, TILE_OUT_ROW, TILE_OUT_ROWS,
) = range(len(TILE_FIELDS))  # fmt: skip
"""An entry of the table of tiles, int32: what a block does with 128 rows of queries (or, for dK and dV, of keys).

- ``row``: the first packed row.
- ``others``: the first packed row of the same sequence among the keys (or queries).
- ``first``, ``last``: the range of their tiles that some row attends to; ``last`` is exclusive.
- ``whole_first``, ``whole_last``: the range within it that needs no mask.
- ``count``: number of keys (or queries) of the sequence.
- ``diagonal``: row r of the tile attends to ``diagonal + r - left`` to ``min(diagonal + r + right, count - 1)``.
- ``valid``: number of rows of the tile that belong to the sequence.
- ``sequence``, ``out_row``, ``out_rows``: where the tile's result starts, and how many of its rows are written.
"""
ROW_FIELDS = ("sequence", "source_row", "valid", "row")
"""An entry of the table of blocks to cast, int32: 128 rows of a sequence, from ``source_row`` of the tensor on, of
which ``valid`` are read; the others are 0. ``row``: the first packed row."""
SEQUENCE_FIELDS = ("block", "rows")
"""An entry of the table of sequences, int32: the first block of 128 packed rows, and the number of rows to average."""


@dataclass(frozen=True)
class HeadSize:
    """The number of channels of a head.

    Attributes:
        head_dim: one of :data:`HEAD_DIMS`.

    Raises:
        ValueError: If ``head_dim`` is not supported.
    """

    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: attention's kernels are for {HEAD_DIMS}; pad the heads")


@dataclass(frozen=True)
class AttentionSpec(HeadSize):
    """Compile-time options of a kernel; masks, lengths and head groups are its parameters.

    Attributes:
        out_dtype: dtype of the result, ``bfloat16``, ``float16`` or ``float32``.
    """

    out_dtype: DtypeName

    @property
    def panels(self) -> int:
        """Number of 128-byte boxes per row of codes."""
        return max(1, self.head_dim // 128)

    @property
    def k_steps(self) -> int:
        """Number of products of 32 channels per panel."""
        return min(self.head_dim, 128) // 32

    def __str__(self) -> str:
        return f"d={self.head_dim} {self.out_dtype}"
