"""The tables that attention's blocks read, against masks element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cuda_kernels.attention.host.tiles import (
    PackedRows,
    RowSpace,
    Visible,
    cast_table,
    mean_tables,
    packed_rows,
    tile_table,
)
from cuda_kernels.attention.spec import ROWS, TILE_FIELDS
from lightning_fp8.attention.ops import Band
from tests.attention.ops.attention_cases import CAUSAL, visible_keys
from tests.cuda_kernels.cases.attention_kernel_cases import rows_of

BANDS = [
    Band(), CAUSAL, Band(right=0, bottom_right=True), Band(left=100, right=20), Band(left=0, right=0),
    Band(left=130, right=0, bottom_right=True), Band(right=200), Band(left=5, right=300, bottom_right=True),
]  # fmt: skip
LENGTHS = [([300], [300]), ([130, 1, 0, 257], [259, 128, 40, 0]), ([128, 256], [256, 128]), ([64, 200], [500, 129])]
TAIL = 140


def laid_out(lengths: list[int], form: str) -> PackedRows:
    """In a padded batch, or one after the other with rows of nobody behind them."""
    own = torch.tensor(lengths)
    if form == "padded":
        return rows_of(own, max(lengths) + 5)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return packed_rows(RowSpace(len(lengths), sum(lengths) + TAIL, True), cu_seqlens, own.device)


def owners(lengths: list[int], form: str) -> dict[int, tuple[int, int, int]]:
    """By first packed row of each block of somebody: the sequence, the first row there, and rows that are written."""
    found, begin = {}, 0
    for sequence, length in enumerate(lengths):
        start = begin // ROWS + sequence if form == "ragged" else sequence * -(-(max(lengths) + 5) // ROWS)
        held = max(lengths) + 5 if form == "padded" else length + (TAIL if sequence == len(lengths) - 1 else 0)
        for row in range(0, held, ROWS):
            found[(start + row // ROWS) * ROWS] = sequence, row, min(ROWS, held - row)
        begin += length
    return found


@pytest.mark.parametrize("form", ["padded", "ragged"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("tile", [128, 64])
def test_tiles_are_those_that_somebody_sees(
    band: Band, lengths: tuple[list[int], list[int]], form: str, tile: int
) -> None:
    queries, keys = (laid_out(each, form) for each in lengths)
    table = tile_table(queries, keys, Visible(band.left, band.right, band.bottom_right), tile)
    assert table.dtype == torch.int32
    entries = {entry[0]: dict(zip(TILE_FIELDS, entry)) for entry in table.tolist()}
    assert sorted(entries) == list(range(0, queries.space.total, ROWS)), "each block once"
    belonging = owners(lengths[0], form)
    first_keys = {sequence: row for row, (sequence, start, _) in owners(lengths[1], form).items() if not start}
    for row, each in entries.items():
        if row not in belonging:
            assert each["valid"] == each["out_rows"] == each["first"] == each["last"] == 0
            continue
        sequence, start, written = belonging[row]
        count = lengths[1][sequence]
        see = visible_keys(lengths[0][sequence], count, band)[start : start + ROWS]
        assert (each["sequence"], each["out_rows"], each["valid"]) == (sequence, written, len(see))
        assert each["others"] == first_keys.get(sequence, each["others"])
        assert each["count"] == count
        assert each["out_row"] == start + (sum(lengths[0][:sequence]) if form == "ragged" else 0)
        seen = [j // tile for j in see.any(0).nonzero().flatten().tolist()]
        visited = range(each["first"], each["last"])
        assert list(visited) == (list(range(min(seen), max(seen) + 1)) if seen else [])
        assert (each["last"] - each["first"]) * tile <= Visible(band.left, band.right).most_seen(keys.space)
        for index in visited:
            columns = see[:, index * tile : (index + 1) * tile]
            whole = columns.shape[1] == tile and bool(columns.all())
            assert whole == (each["whole_first"] <= index < each["whole_last"])
        i, column = torch.arange(len(see))[:, None], torch.arange(count)
        low = each["diagonal"] + i - (1 << 29 if band.left is None else band.left)
        high = each["diagonal"] + i + (1 << 29 if band.right is None else band.right)
        assert torch.equal(see, (low <= column) & (column <= high))
    work = (table[:, 3] - table[:, 2]).tolist()
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_rows_that_are_cast(form: str) -> None:
    lengths = [130, 0, 257]
    rows = laid_out(lengths, form)
    begins = [0, 130, 130] if form == "ragged" else [0, 0, 0]
    found = {entry[3]: entry for entry in cast_table(rows).tolist()}
    belonging = owners(lengths, form)
    assert sorted(found) == list(range(0, rows.space.total, ROWS))
    for row, entry in found.items():
        if row in belonging:
            sequence, start, _ = belonging[row]
            valid = max(0, min(ROWS, lengths[sequence] - start))
            assert entry == [sequence, begins[sequence] + start, valid, row]
        else:
            assert entry[2] == 0
    blocks = [0, 2, 3] if form == "ragged" else [0, 3, 6]
    of_all, counts = mean_tables(rows, cast_table(rows), None)
    assert torch.equal(of_all, cast_table(rows))
    assert counts.tolist() == [list(pair) for pair in zip(blocks, lengths)]
    of_first, counts = mean_tables(rows, cast_table(rows), ROWS)
    assert of_first.tolist() == [[b, begins[b], min(n, ROWS), ROWS * blocks[b]] for b, n in enumerate(lengths)]
    assert counts.tolist() == [[block, min(n, ROWS)] for block, n in zip(blocks, lengths)]


def test_ragged_blocks_are_enough_for_any_lengths() -> None:
    for lengths in itertools.product((0, 1, 127, 128, 129), repeat=3):
        rows = rows_of(torch.tensor(lengths))
        ends = rows.starts + (-(-rows.held // ROWS)) * ROWS
        assert (ends[:-1] <= rows.starts[1:]).all()
        assert ends[-1] <= rows.space.total


@pytest.mark.parametrize("ragged", [False, True])
def test_tables_are_made_of_shapes_alone(ragged: bool) -> None:
    """On a device whose values nobody can ask for: nothing waits for a card."""
    cu_seqlens = torch.empty(5, dtype=torch.int32, device="meta")
    rows = packed_rows(RowSpace(4, 300, ragged), cu_seqlens, cu_seqlens.device)
    tables = (
        tile_table(rows, rows, Visible(None, 0, True)),
        cast_table(rows),
        *mean_tables(rows, cast_table(rows), ROWS),
    )
    blocks = 300 // 128 + 4 if ragged else 4 * 3
    assert [tuple(table.shape) for table in tables] == [(blocks, 12), (blocks, 4), (4, 4), (4, 2)]


@pytest.mark.parametrize("bounds", [[0, 900, 200, 700], [3, -5, 2000, 100], [500, 400, 300, 200]])
@pytest.mark.parametrize("ragged", [False, True])
def test_starts_that_nobody_checked_touch_nothing_outside(bounds: list[int], ragged: bool) -> None:
    rows = packed_rows(RowSpace(3, 600, ragged), torch.tensor(bounds), torch.device("cpu"))

    def inside(first: Tensor, count: Tensor, most: int) -> bool:
        some = count > 0
        return bool(((first >= 0) & (first + count <= most))[some].all())

    cast = cast_table(rows)
    assert inside(cast[:, 1], cast[:, 2], 600)
    tiles = tile_table(rows, rows, Visible(bottom_right=True))
    assert inside(tiles[:, 10], tiles[:, 11], 600)
    assert inside(tiles[:, 1], tiles[:, 3] * ROWS, rows.space.total)


def test_causal_tiles_with_most_keys_come_first() -> None:
    rows = rows_of(torch.tensor([1024, 1024]), 1024)
    table = tile_table(rows, rows, Visible(right=0))
    work = table[:, 3] - table[:, 2]
    assert work[:2].tolist() == [8, 8]
    assert work[-2:].tolist() == [1, 1]
