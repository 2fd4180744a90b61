"""``lightning-fp8 bench``: what it times, what it keeps, and that training takes it. The clock is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.host import gemm_configs, gemm_measurements, gemm_selection
from cuda_kernels.host.gemm_configs import Library
from cuda_kernels.host.launch import executing
from lightning_fp8.cli import bench
from lightning_fp8.cli import main as cli
from lightning_fp8.numerics.recipes import make_recipe
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.proofs.comparing import kernels_of
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.tiers import thorough

CPU = torch.device("cpu")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(gemm_measurements, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(gemm_configs, "_SHAPES", ((1, 1, 128),))
    monkeypatch.setattr(bench, "ROUNDS", 3)
    gemm_measurements.measured_on.cache_clear()
    plans.clear_plan_cache()
    yield tmp_path
    gemm_measurements.measured_on.cache_clear()
    plans.clear_plan_cache()


def test_the_products_of_a_layer() -> None:
    forward, of_input, of_weight = bench.gemms_of(32, 48, 16)
    assert (forward.m, forward.n, forward.k, forward.fast) == (16, 48, 32, True)
    assert (of_input.m, of_input.n, of_input.k, of_input.fast) == (16, 32, 48, False)
    assert (of_weight.m, of_weight.n, of_weight.k, of_weight.fast) == (48, 32, 16, False)


@thorough
@needs_compilers
def test_the_winner_is_kept_and_taken(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here our tile is the fastest."""
    emulator = Emulator(races=False)
    ours: list[bool] = []

    def clock(call: Callable[[], object]) -> float:
        before = len(emulator.launched)
        call()
        ours.append(len(emulator.launched) > before)
        return 1.0 if ours[-1] else 2.0

    def multiply() -> int:
        """How many kernels of ours the op launches for the forward product."""
        before = len(emulator.launched)
        a, b = (torch.ones(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
        gemm = Gemm(Layout.TENSOR, Layout.TENSOR, torch.bfloat16, fast_accum=True)
        kernels_of(scaled_mm_op)(a, torch.ones(()), b, torch.ones(()), gemm)
        return len(emulator.launched) - before

    with executing(emulator):
        assert multiply() == 0  # cuBLASLt's, which nothing was measured against
        bench.bench(bench.gemms_of(32, 48, 16), make_recipe("tensorwise"), CPU, clock, tune=True)
        assert multiply() == 1
        printed = capsys.readouterr().out
        assert "32x48 weight gradient: [48, 16] x [32, 16]ᵀ" in printed
        assert printed.count("cublaslt") == 3
        assert f"kept 3 choices in {own_cache / 'gemm-cpu.json'}" in printed
        of, recipe = bench.gemms_of(32, 48, 16)[0], make_recipe("tensorwise")
        job = bench.bound_gemm(of, recipe, CPU)
        calls = bench.candidates(of, recipe, job)
    assert set(calls) == {
        choice for choice in gemm_configs.legal_choices(job.problem) if choice is not Library.REFERENCE
    }
    assert sum(ours) == 3 * 3  # products, rounds
    kept = gemm_measurements.measured_on("cpu")
    assert [each.sizes for each in kept] == [(16, 48, 32), (16, 32, 48), (48, 32, 16)]
    assert all(isinstance(each.choice, GemmConfig) for each in kept)
    assert gemm_selection.choose_gemm(job.problem, kept) == kept[0].choice
    assert gemm_selection.choose_gemm(job.problem) is Library.CUBLASLT


def test_a_plan_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    times = bench.timed({Library.CUBLASLT: fails, Library.REFERENCE: lambda: torch.ones(1)}, lambda call: 1.0)
    assert times == {Library.REFERENCE: 1.0}
    assert "cublaslt does not run: no such kernel" in capsys.readouterr().out.lower().replace("library.", "")


@pytest.mark.parametrize(
    ("without", "exact", "compared"),
    [
        ((Layout.BLOCK_1X128, Layout.BLOCK_1X128), "32x48 weight gradient", ["forward", "input gradient"]),
        ((Layout.BLOCK_1X128, Layout.BLOCK_128X128), "32x48 forward, 32x48 input gradient", ["weight gradient"]),
    ],
)
def test_products_without_kernels_are_named(
    without: tuple[Layout, Layout],
    exact: str,
    compared: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(bench.SCALINGS, without)
    monkeypatch.setattr(bench, "candidates", lambda *args: {})
    bench.bench(bench.gemms_of(32, 48, 16), make_recipe("blockwise"), CPU, lambda call: 1.0, tune=False)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"not timed, since no kernel multiplies them with recipe='blockwise': {exact}"
    assert [line.partition(":")[0] for line in lines if line.startswith("32x48")] == [f"32x48 {n}" for n in compared]


def test_speeds_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for each product and choice, as long as the product is fast."""
    drawn: list[float] = []
    monkeypatch.setattr("matplotlib.axes.Axes.barh", lambda self, place, width, **style: drawn.append(width))
    found = [(of, {Library.CUBLASLT: 1e-6 * number}) for number, of in enumerate(bench.gemms_of(32, 48, 16), 1)]
    bench.plot(found, "a card", tmp_path / "speeds.png")
    assert drawn == pytest.approx([2 * 16 * 32 * 48 / (1e-6 * number) / 1e12 for number in (1, 2, 3)])
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def test_errors(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no kernel of this package multiplies recipe='mxfp8'"):
        bench.bench(bench.gemms_of(32, 48, 16), make_recipe("mxfp8"), CPU, lambda call: 1.0, tune=False)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--linear", "4096"])
    assert "'4096' must be in_features x out_features, as in 4096x14336" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="torch finds none"):
            cli.main(["bench", "--linear", "32x48"])
