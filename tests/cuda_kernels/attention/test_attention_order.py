"""Which heads' blocks run together, and that each tile of each head has one block."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_kernels.attention.backward.memory import scratch_floats
from cuda_kernels.attention.host import backward, order
from cuda_kernels.attention.host.backward import BackwardLaunch
from cuda_kernels.attention.host.forward import AttentionProblem
from cuda_kernels.attention.host.order import Order, assuming_l2_bytes, order_of
from cuda_kernels.attention.host.tiles import RowSpace, Visible
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.host.launch import Argument, Grid, address_on, executing
from cuda_kernels.kernel import Kernel
from lightning_fp8.ops.plans import clear_plan_cache
from lightning_fp8.proofs.attention import Problem, check_backward, check_forward
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import thorough

SPEC = AttentionSpec(64, "bfloat16")
CPU = torch.device("cpu")
MEGABYTE = 2**20


def on_h200(heads: int, tiles: int, megabytes: float, group: int = 1, multiprocessors: int = 132) -> Order:
    """The order on a GPU of the sizes of an H200."""
    with (
        assuming_l2_bytes(60 * MEGABYTE),
        patch.object(order, "multiprocessors", lambda device: multiprocessors),
    ):
        return order_of(heads, tiles, megabytes * MEGABYTE, CPU, group)


@pytest.mark.parametrize(
    ("heads", "tiles", "megabytes", "group", "right"),
    [
        (16, 256, 1.0, 1, (256, 16, 1)),  # all 16 MB fit into half of the cache
        (16, 256, 8.0, 1, (256, 2, 8)),  # 3 heads would fit, and 2 divide 16
        (16, 256, 17.0, 1, (256, 2, 8)),  # one fits, and its 256 blocks are not two waves of 132
        (16, 264, 17.0, 1, (264, 1, 16)),
        (4, 256, 17.0, 4, (256, 4, 4)),  # of four heads that share keys
        (25, 16, 17.0, 1, (16, 25, 1)),  # 5 heads have 80 blocks
        (25, 60, 1.0, 1, (60, 25, 1)),
        (25, 60, 4.0, 1, (60, 5, 5)),
        (2, 3, 100.0, 1, (3, 2, 1)),
        (1, 1, 0.0, 1, (1, 1, 1)),
        (1, 65_536, 0.1, 1, (65_536, 1, 1)),
    ],
)
def test_heads_at_once_by_hand(heads: int, tiles: int, megabytes: float, group: int, right: tuple[int, ...]) -> None:
    assert on_h200(heads, tiles, megabytes, group) == right


@given(st.integers(1, 200), st.integers(0, 2000), st.floats(0, 500), st.integers(1, 8), st.integers(1, 200))
def test_each_tile_of_each_head_has_one_block(
    heads: int, tiles: int, megabytes: float, group: int, multiprocessors: int
) -> None:
    found = on_h200(heads, tiles, megabytes, group, multiprocessors)
    assert found.grid(2) == (2 * tiles * found.heads_at_once, found.sections, 1)
    assert found.heads_at_once * found.sections == heads * group
    assert found.heads_at_once % group == 0, "heads that share keys run together"
    assert not tiles or found.sections == 1 or found.heads_at_once * tiles >= 2 * multiprocessors


@pytest.mark.parametrize(("causal", "rows"), [(False, 1024), (True, 16 * 1024)])
def test_sequences_whose_blocks_run_together(causal: bool, rows: int) -> None:
    """Without a mask, tiles are in the order of sequences; else those with the most work of all come first."""
    space, visible = RowSpace(16, 1024, False), Visible(right=0) if causal else Visible()
    problem = AttentionProblem(AttentionSpec(64, "bfloat16"), (4, 2), space, space, visible, 0.1)
    asked = []
    with patch("cuda_kernels.attention.host.forward.order_of", lambda *args: asked.append(args)):
        problem.order_of_queries(2, CPU)
        problem.order_of_keys(4, CPU)
    assert asked == [(2, 128, 2 * 64 * rows, CPU, 2), (2, 128, 4 * 64 * rows * 2, CPU)]


class NotesGrids(Emulator):
    """Notes the grids of launches."""

    def __init__(self) -> None:
        super().__init__(races=False)
        self.grids: dict[str, Grid] = {}

    def __call__(self, kernel: Kernel, grid: Grid, args: object) -> None:
        self.grids[kernel.function.__name__] = grid
        super().__call__(kernel, grid, args)  # type: ignore[arg-type]


@needs_compilers
@pytest.mark.parametrize(
    ("architecture", "heads", "channels"),
    [
        ("90a", (8, 8), 64),
        pytest.param("90a", (12, 6), 128, marks=thorough),
        pytest.param("90a", (8, 8), 256, marks=thorough),
        pytest.param("120", (8, 8), 64, marks=thorough),
        pytest.param("120", (12, 6), 256, marks=thorough),
    ],
)
def test_sections_of_heads_compute_the_same(architecture: str, heads: tuple[int, int], channels: int) -> None:
    """All kernels of both passes, in more than one section, against the specification."""
    problem, emulator = Problem("bshd", ((260, 260),), heads, channels, uniform=True), NotesGrids()
    clear_plan_cache()
    with assuming_l2_bytes(0), executing(emulator, architecture):
        check_backward(problem, "cpu", check_forward(problem, "cpu"))
    clear_plan_cache()
    of_attention = {name: grid for name, grid in emulator.grids.items() if "attention" in name}
    passes = {name.removeprefix("mma_").removesuffix("_256") for name in of_attention}
    assert passes >= {"attention_forward", "attention_dq", "attention_dkv"}
    assert all(grid[1] > 1 for grid in of_attention.values()), of_attention


@needs_compilers
def test_blocks_of_all_sections_have_sums_of_their_own() -> None:
    """In global memory: blocks that share them would run one after the other on the emulator, and pass."""
    problem, kept = Problem("bshd", ((260, 130),), (8, 8), 64, uniform=True), []

    def noting(device: torch.device) -> Callable[[torch.Tensor], Argument]:
        pointer = address_on(device)
        return lambda x: kept.append(x) or pointer(x)

    clear_plan_cache()
    emulator = NotesGrids()
    with (
        assuming_l2_bytes(0),
        executing(emulator, "90a"),
        patch.object(BackwardLaunch.__init__, "__defaults__", (128,)),
        patch.object(backward, "address_on", noting),
    ):
        check_backward(problem, "cpu")
    clear_plan_cache()
    tiles, sections, _ = emulator.grids["attention_dkv"]
    (sums,) = [x for x in kept if x.dim() == 1 and x.numel() == tiles * sections * scratch_floats(SPEC)]
    assert sections > 1
    assert sums.view(tiles * sections, -1).isfinite().all(), "new memory is NaN"
