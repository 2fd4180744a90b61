"""The table of a grouped GEMM's row tiles, made on the device from where groups end, so that the host does not wait.

It is int32 ``[1 + tiles, 4]``: the number of tiles, then for each tile its first row, the end of its group's rows, the
group, and the first K iteration. That is 0, and for rows of no group :data:`BEHIND_K`.
"""

from __future__ import annotations

from functools import cache

from cuda_kernels.device.language import cuda, device, i32, i64, u32
from cuda_kernels.device.ptx import load_4, quotient, store_4, store_16
from cuda_kernels.kernel import Kernel, typed

THREADS = 256
BEHIND_K = 1 << 20
"""A K iteration of which TMA reads zeros, behind every K; its first element is still an int32."""


def max_row_tiles(rows: int, groups: int, tile_m: int) -> int:
    """The most tiles of ``rows`` in ``groups``, and behind them: each group may end with a tile that is not full."""
    return rows // tile_m + groups + 1


@device
def load_row_tile(row_tiles, tile_idx):
    """A tile of the table: first row, end, group, first K iteration."""
    address = row_tiles + (i64(tile_idx) + 1) * 16
    return i32(load_4(address)), i32(load_4(address + 4)), i32(load_4(address + 8)), i32(load_4(address + 12))


@device
def load_end(offs, group, row, rows):
    """Where the group that begins at ``row`` ends."""
    return min(max(i32(load_4(offs + i64(group) * 4)), i32(row)), i32(rows))


@cache
def group_rows_kernel(tile_m: int) -> Kernel:
    """Write the table of tiles of ``tile_m`` rows, given ``offs`` int32 ``[groups]``, the ends of the groups.

    One block. A thread writes the tiles of every 256th group, and adds up the tiles before them. Rows from the last end
    to ``rows`` are a further group, which has the first group's B. An end before the one before it is taken for that
    one, and an end behind ``rows`` for ``rows``, so that the table has no more tiles than :func:`max_row_tiles`.
    """

    def group_rows(offs, row_tiles, groups, rows):
        for group in range(cuda.threadIdx.x, groups + 1, THREADS):
            row, tile_idx = i32(0), i32(0)
            for before in range(group):
                end = load_end(offs, before, row, rows)
                tile_idx += quotient(end - row + (tile_m - 1), tile_m)
                row = end
            end, group_b, first_k_iter = rows, i32(0), i32(BEHIND_K)
            if group < groups:
                end, group_b, first_k_iter = load_end(offs, group, row, rows), i32(group), i32(0)
            while row < end:
                store_16(row_tiles + (i64(tile_idx) + 1) * 16, u32(row), u32(end), u32(group_b), u32(first_k_iter))
                row += tile_m
                tile_idx += 1
            if group == groups:
                store_4(row_tiles, u32(tile_idx))

    return Kernel(
        f"group_rows({tile_m})",
        group_rows,
        {**typed(i64, "offs row_tiles"), **typed(i32, "groups rows")},
        THREADS,
    )
