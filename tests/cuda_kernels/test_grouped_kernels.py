"""Products of groups on Hopper, emulated: orders of tiles, wrong kernels, and what the loop multiplies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

from cuda_kernels.gemm import epilogue, groups, promotion, wgmma
from cuda_kernels.host import gemm_launcher, launch
from cuda_kernels.host.launch import Argument, Grid, executing
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops import grouped_cuda
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import WrongResult
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.grouped_cases import CASES
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.ptx_on_cpu import EmulatorError
from tests.tiers import late_rows, thorough

Order = Callable[[int], torch.Tensor]


def descending(tiles: int) -> torch.Tensor:
    return torch.arange(tiles).flip(0)


def shuffled(tiles: int) -> torch.Tensor:
    return torch.randperm(tiles, generator=torch.Generator().manual_seed(tiles))


class Reordering:
    """An emulator that changes the order of tiles in the table, which no result depends on.

    It runs one block after the other, so that in ascending order a tile's owner would repair what the one before it
    wrote too much.
    """

    def __init__(self, order: Order, **options: Any) -> None:
        self.order, self.emulator = order, Emulator(**options)

    def __call__(self, kernel: Kernel, grid: Grid, args: Sequence[Argument | float]) -> None:
        self.emulator(kernel, grid, args)
        if kernel.function.__name__ == "group_rows":
            table = args[1]
            assert isinstance(table, torch.Tensor)
            tiles = table[1 : 1 + int(table[0, 0])]
            tiles.copy_(tiles[self.order(len(tiles))])


@needs_compilers
@late_rows("case", lambda: tiered(CASES))
def test_case(case: Case) -> None:
    reordering = Reordering(descending)
    with executing(reordering):
        case.run("cpu")
    assert [kernel.function.__name__ for kernel in reordering.emulator.launched] == ["group_rows", "gemm"]


@needs_compilers
@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, marks=() if "1/1/128-fast" in case.name else thorough, id=f"{case.name}-{at}")
        for at, options in enumerate(
            ({"schedule": "reverse", "copies": "late"}, {"schedule": "random", "copies": "random", "seed": 1})
        )
        for case in CASES
    ],
)
def test_the_order_of_tiles_threads_and_copies_changes_nothing(case: Case, options: dict[str, Any]) -> None:
    with executing(Reordering(shuffled, **options)):
        case.run("cpu")


@needs_compilers
@pytest.mark.parametrize("tile_m", [64, 256])
def test_the_table_of_tiles(tile_m: int) -> None:
    """By a loop over groups; more groups than threads, and no more tiles than memory is allocated for."""
    generator = torch.Generator().manual_seed(tile_m)
    for experts, rest in ((1, 0), (5, 70), (300, 1)):
        sizes = torch.randint(0, 200, (experts,), generator=generator)
        sizes[torch.rand(experts, generator=generator) < 0.3] = 0
        ends = [*itertools.accumulate(sizes.tolist()), int(sizes.sum()) + rest]
        expected, start = [], 0
        for group, end in enumerate(ends):
            last = group == experts
            first_k_iter = groups.BEHIND_K if last else 0
            expected += [(row, end, 0 if last else group, first_k_iter) for row in range(start, end, tile_m)]
            start = end
        most = groups.max_row_tiles(ends[-1], experts, tile_m)
        assert len(expected) <= most
        table = torch.full((1 + most, 4), -1, dtype=torch.int32)
        offs = torch.tensor(ends[:-1], dtype=torch.int32)
        with executing(Emulator()):
            launch.named_launch(
                groups.group_rows_kernel(tile_m), 1, torch.device("cpu"), groups=experts, rows=ends[-1]
            ).run(offs, table)
        assert int(table[0, 0]) == len(expected)
        assert table[1 : 1 + len(expected)].tolist() == [list(each) for each in expected]


# --- Wrong kernels ----------------------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[ModuleType, str, str, str]] = {
    "nothing": (wgmma, "group * n + tile_col)", "group * n + tile_col)", "tensor"),
    "boxes are stored whole": (epilogue, "if grouped and first_row + 64 > m:", "if first_row >= m:", "tensor"),
    "rows are stored without limit": (epilogue, "if first_row + row < m and col < n:", "if col < n:", "tensor"),
    "columns are stored without limit": (epilogue, "row < m and col < n:", "row < m:", "tensor"),
    "B of the first group": (wgmma, "group * n + tile_col)", "tile_col)", "tensor"),
    "iterations are rounded down": (wgmma, "quotient(k + (TILE_K - 1), TILE_K)", "quotient(k, TILE_K)", "tensor"),
    "rows of no group are multiplied": (wgmma, "(first_k_iter + k_iter) * TILE_K", "k_iter * TILE_K", "tensor"),
    "scales of the first group's rows": (wgmma, "i64(group) * i64(n) * 4", "i64(0)", "row"),
    "scales of the first group's blocks": (promotion, "before = group *", "before = 0 *", "block"),
    "scales of this group's blocks for the next tile": (wgmma, "next_group if last else group", "group", "block"),
    "rows of no group are not written": (groups, "rows, i32(0), i32(BEHIND_K)", "row, i32(0), i32(BEHIND_K)", "tensor"),
    "tiles are rounded down": (groups, "end - row + (tile_m - 1)", "end - row", "tensor"),
}  # fmt: skip
"""The module, its text, what stands in its place, and the scaling whose case notices."""


def mutated(module: ModuleType, text: str, instead: str) -> ModuleType:
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(text) == 1, text
    made = ModuleType(module.__name__)
    exec(compile(source.replace(text, instead), module.__file__, "exec"), vars(made))
    return made


@thorough
@needs_compilers
@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_kernel_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, text, instead, scaling = MUTANTS[what]
    made = mutated(module, text, instead)
    if module is groups:
        monkeypatch.setattr(grouped_cuda, "group_rows_kernel", made.group_rows_kernel)
    else:
        kernels = made if module is wgmma else mutated(wgmma, "group * n + tile_col)", "group * n + tile_col)")
        for name in ("make_epilogue_store", "block_scale_readers"):
            setattr(kernels, name, getattr(made, name, getattr(kernels, name)))
        monkeypatch.setattr(gemm_launcher, "gemm_kernel", kernels.gemm_kernel)
    cases = [case for case in CASES if case.name.startswith(f"grouped-{scaling}-70") and "1/1/128" in case.name]
    assert cases
    noticed = nullcontext() if what == "nothing" else pytest.raises((WrongResult, EmulatorError))
    with executing(Reordering(descending)), noticed:
        for case in cases:
            case.run("cpu")
