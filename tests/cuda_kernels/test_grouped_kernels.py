"""Products of groups on Hopper, emulated: orders of tiles, wrong kernels, and what the loop multiplies."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from cuda_kernels.gemm import epilogue, groups, promotion, wgmma
from cuda_kernels.gemm.spec import GemmConfig, GemmSpec, Scaling
from cuda_kernels.host import gemm_launcher, gemm_selection, launch
from cuda_kernels.host.gemm_configs import GemmProblem, fastest_by_estimate, legal_configs, num_tiles
from cuda_kernels.host.launch import Argument, Grid, executing
from cuda_kernels.kernel import Kernel
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import grouped_cuda, plans
from lightning_fp8.ops.gemm import Gemm, reference_gemm, scaled_mm_op
from lightning_fp8.ops.gemm_cuda import gemm_on_cuda
from lightning_fp8.ops.grouped import ends_of, grouped_mm_op
from lightning_fp8.proofs.cases import Case
from lightning_fp8.proofs.comparing import WrongResult, reference_of
from lightning_fp8.proofs.products import operand
from tests.cuda_kernels.cases.all_cases import tiered
from tests.cuda_kernels.cases.gemm_cases import PAIRS, multiplying
from tests.cuda_kernels.cases.grouped_cases import CASES
from tests.cuda_kernels.cases.kernel_cases import E4M3
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


@needs_compilers
@pytest.mark.parametrize("ends", [(600, 10, 300), (10, 5000, 300), (-900, 70, -1)])
def test_the_table_holds_ends_that_are_wrong(ends: tuple[int, ...]) -> None:
    """Which nobody checks, as the host would wait: every row is in one tile, and nothing is written elsewhere."""
    rows, tile_m = 400, 64
    table = torch.full((1 + groups.max_row_tiles(rows, len(ends), tile_m), 4), -1, dtype=torch.int32)
    with executing(Emulator()):
        launch.named_launch(groups.group_rows_kernel(tile_m), 1, torch.device("cpu"), groups=len(ends), rows=rows).run(
            torch.tensor(ends, dtype=torch.int32), table
        )
    tiles = table[1 : 1 + int(table[0, 0])].tolist()
    covered = [row for first, end, *_ in tiles for row in range(first, min(first + tile_m, end))]
    assert covered == list(range(rows))
    assert (table[1 + len(tiles) :] == -1).all()


# --- What multiplies --------------------------------------------------------------------------------------------------


def operands(
    layouts: tuple[Layout, Layout], ends: Sequence[int], shape: tuple[int, int], rest: int = 0
) -> tuple[torch.Tensor, ...]:
    """``a, scale_a, b, scale_b, offs`` of random numbers."""
    n, k = shape
    a = operand(torch.randn(ends[-1] + rest, k), E4M3, layouts[0], False)
    experts = [operand(torch.randn(n, k), E4M3, layouts[1], False) for _ in ends]
    scales = [each.scale_inv for each in experts]
    b = torch.stack([each.data.view(torch.uint8) for each in experts]).view(E4M3)
    scale_b = scales[0] if layouts[1].has_one_scale else torch.stack([each.view(torch.uint8) for each in scales])
    return a.data, a.scale_inv, b, scale_b.view(scales[0].dtype), torch.tensor(ends, dtype=torch.int32)


@needs_compilers
@pytest.mark.parametrize("scaling", ["tensor", pytest.param("row", marks=thorough), "block"])
def test_a_group_equals_the_product_without_groups(scaling: str) -> None:
    """To the bit, of numbers whose sums are not exact."""
    a, scale_a, b, scale_b, offs = operands(PAIRS[scaling], (70, 70, 150), (144, 272), rest=9)
    gemm = Gemm(*PAIRS[scaling], torch.float32)
    with executing(Emulator()), multiplying("90a", 1, 1, 128):
        actual = grouped_cuda.grouped_mm_on_cuda(a, scale_a, b, scale_b, offs, gemm)
        assert not actual[150:].any()
        for group, rows in ((0, slice(0, 70)), (2, slice(70, 150))):
            of_a, of_b = (each if not each.dim() else each[at] for each, at in ((scale_a, rows), (scale_b, group)))
            assert torch.equal(actual[rows], gemm_on_cuda(a[rows], of_a, b[group], of_b, gemm, None))


@needs_compilers
@pytest.mark.parametrize(("scaling", "experts"), [("row", True), ("row", False), ("block", True)])
def test_rows_of_no_group_are_zeros_whatever_the_scales_are(scaling: str, experts: bool) -> None:
    """Scales are NaN: the first expert's, or those of the rows."""
    a, scale_a, b, scale_b, offs = operands(PAIRS[scaling], (0, 3, 20), (16, 48), rest=9)
    of_nan = scale_b[0] if experts else scale_a[20:]
    of_nan.fill_(torch.nan)
    with executing(Emulator()), multiplying("90a", 1, 1, 128):
        actual = grouped_cuda.grouped_mm_on_cuda(a, scale_a, b, scale_b, offs, Gemm(*PAIRS[scaling], torch.float32))
    assert actual[:20].isfinite().all()
    assert not actual[20:].any()


MX = Layout.MX_1X32, Layout.MX_1X32


@pytest.mark.parametrize(
    ("architecture", "layouts", "shape", "rows", "said"),
    [
        ("89", PAIRS["tensor"], (32, 64), 40, []),
        ("90a", PAIRS["blocks"], (32, 64), 40, []),
        ("90a", MX, (32, 64), 40, ["scaled 1x32 and 1x32"]),
        ("90a", PAIRS["row"], (32, 72), 40, ["3 experts of 32 x 72 on cpu", "multiples of 16 avoid it"]),
        ("90a", PAIRS["tensor"], (36, 64), 40, ["3 experts of 36 x 64 on cpu", "multiples of 16 avoid it"]),
        ("90a", PAIRS["block"], (32, 64), 0, []),
    ],
)
def test_where_a_loop_multiplies(
    architecture: str,
    layouts: tuple[Layout, Layout],
    shape: tuple[int, int],
    rows: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other GPUs, layouts without a kernel, rows that are not aligned (which is said once), and no rows."""
    ends = (min(rows, 7), min(rows, 7), rows)
    gemm = Gemm(*layouts, torch.bfloat16)
    given = operands(layouts, ends, shape)
    right = torch.cat(
        [
            reference_of(scaled_mm_op)(
                *(given[0][start:end], given[1][start:end] if given[1].dim() else given[1]),
                *(given[2][group], given[3][group] if given[3].dim() else given[3]),
                gemm,
            )
            for group, (start, end) in enumerate(zip((0, *ends), ends))
        ]
    )
    launched: list[str] = []
    monkeypatch.setattr(launch, "architecture_of", lambda device: architecture)
    monkeypatch.setitem(scaled_mm_op.implementations, "cpu", gemm_on_cuda if layouts == MX else reference_gemm)
    plans.clear_plan_cache()
    with executing(lambda kernel, *rest: launched.append(kernel.name)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(grouped_cuda.grouped_mm_on_cuda(*given, gemm), right)
    plans.clear_plan_cache()
    assert not launched
    assert len(caught) == bool(said)
    assert all(part in str(caught[0].message) for part in said)


@pytest.mark.parametrize("inference", [False, True])
def test_a_gpu_is_asked_again_for_ends_that_were_changed_in_place(inference: bool) -> None:
    class OnGPU(torch.Tensor):
        is_cuda, asked = True, 0  # type: ignore[assignment]

        def tolist(self) -> list[int]:
            self.asked += 1
            return super().tolist()

    with torch.inference_mode(inference):
        offs: Any = torch.tensor([2, 3], dtype=torch.int32).as_subclass(OnGPU)
        assert ends_of(offs) == ends_of(offs) == [2, 3]
        assert offs.asked == 1
        if not inference:
            offs.copy_(torch.tensor([1, 3], dtype=torch.int32))
            assert ends_of(offs) == [1, 3]


def test_the_user_wants_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm_selection.CHOICE_VARIABLE, "cublaslt")
    plans.clear_plan_cache()
    given, gemm = operands(PAIRS["tensor"], (16, 32), (32, 64)), Gemm(*PAIRS["tensor"], torch.bfloat16)
    with executing(lambda *args: pytest.fail("a kernel runs")):
        actual = grouped_cuda.grouped_mm_on_cuda(*given, gemm)
    plans.clear_plan_cache()
    assert torch.equal(actual, reference_of(grouped_mm_op)(*given, gemm))


@pytest.mark.parametrize(
    ("rows", "experts", "tile"), [(32768, 8, (128, 256)), (131072, 128, (128, 256)), (4096, 128, (64, 128))]
)
def test_groups_of_few_rows_have_small_tiles(rows: int, experts: int, tile: tuple[int, int]) -> None:
    spec = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", promote=False, grouped=True)
    problem = GemmProblem(rows, 1536, 2048, spec, "90a", 132, True, True, groups=experts)
    config = fastest_by_estimate(problem)
    assert isinstance(config, GemmConfig)
    assert (config.tile_m, config.tile_n) == tile
    # Of groups that are no multiples of a tile, the last tile of each is half full on average.
    assert num_tiles(problem, config) == (rows // tile[0] + experts // 2) * (1536 // tile[1])


def test_groups_need_aligned_results_and_wgmma() -> None:
    spec = GemmSpec("e4m3", "e4m3", Scaling.TENSOR, "bfloat16", grouped=True)
    problem = GemmProblem(128, 100, 128, spec, "90a", 132, out_aligned=False, even=True, groups=2)
    assert not legal_configs(problem)
    assert not legal_configs(replace(problem, out_aligned=True, architecture="89"))
    assert legal_configs(replace(problem, out_aligned=True))


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
