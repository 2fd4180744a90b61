"""What attention's kernels agree on: how operands lie in memory, which tiles are visited, what a kernel is built for.

**Packed rows.** Queries and keys have a row space each: the sequences one after the other, each from a multiple of 128
rows on. Heads come first, so that one two-dimensional tensor map serves every layout of a batch. With ``R`` rows in
all, a multiple of 128:

- row copy, uint8 codes ``[H, R, D]``;
- transposed copy, uint8 codes ``[H, D, R]``, each 16 of its columns in the order :data:`ORDER_A`;
- ``scale_inv``, float32 ``[H, R / 128]``;
- statistics of queries, float32 ``[H, R]``.

Rows between a sequence's end and the next multiple of 128 hold code 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from cuda_kernels.device.codec import DtypeName

ROWS = 128
"""Rows of a tile, and of a block of scales."""
HEAD_DIMS = (64, 96, 128, 256)
ORDER_A = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which of 16 rows lies where in a transposed copy: the order in which a thread's registers of an accumulator, packed
two by two, become an 8-bit operand A of wgmma."""
NO_LIMIT = 1 << 29
"""A window's limit that no sequence reaches; sums of some of them fit into int32."""

TILE_FIELDS = (
    "row", "others", "first", "last", "whole_first", "whole_last",
    "count", "diagonal", "valid", "sequence", "out_row", "out_rows",
)  # fmt: skip
(
    TILE_ROW, TILE_OTHERS, TILE_FIRST, TILE_LAST, TILE_WHOLE_FIRST, TILE_WHOLE_LAST,
    TILE_COUNT, TILE_DIAGONAL, TILE_VALID, TILE_SEQUENCE, TILE_OUT_ROW, TILE_OUT_ROWS,
) = range(len(TILE_FIELDS))  # fmt: skip
"""An entry of the table of tiles, int32: what a block does to 128 rows of queries (or, for dK and dV, of keys).

- ``row``: the first packed row.
- ``others``: the first packed row of the same sequence among the keys (or queries).
- ``first``, ``last``: the tiles of those that some row sees, the last one excluded.
- ``whole_first``, ``whole_last``: of these, the ones that every row sees all of.
- ``count``: keys (or queries) of the sequence.
- ``diagonal``: row r of the tile sees ``diagonal + r - left`` to ``min(diagonal + r + right, count - 1)``.
- ``valid``: rows of the tile that belong to the sequence.
- ``sequence``, ``out_row``, ``out_rows``: where the tile's result begins, and how many rows of it are written.
"""
ROW_FIELDS = ("sequence", "source_row", "valid", "row")
"""An entry of the table of blocks that are cast, int32: 128 rows of a sequence, from ``source_row`` of the tensor on,
of which ``valid`` are read; the others are 0. ``row``: the first packed row."""
SEQUENCE_FIELDS = ("block", "rows")
"""An entry of the table of sequences, int32: the first block of 128 packed rows, and the rows whose mean is taken."""


@dataclass(frozen=True)
class HeadSize:
    """The channels of a head.

    Attributes:
        head_dim: one of :data:`HEAD_DIMS`.

    Raises:
        ValueError: there is no kernel for ``head_dim``.
    """

    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}: attention's kernels are for {HEAD_DIMS}; pad the heads")


@dataclass(frozen=True)
class AttentionSpec(HeadSize):
    """What a kernel is compiled for; masks, lengths and shared heads are its parameters.

    Attributes:
        out_dtype: dtype of the result, ``bfloat16``, ``float16`` or ``float32``.
    """

    out_dtype: DtypeName

    @property
    def panels(self) -> int:
        """Boxes of 128 bytes side by side that hold a row of codes."""
        return max(1, self.head_dim // 128)

    @property
    def k_steps(self) -> int:
        """Products of 32 channels in a panel."""
        return min(self.head_dim, 128) // 32

    def __str__(self) -> str:
        return f"d={self.head_dim} {self.out_dtype}"
