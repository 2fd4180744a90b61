"""Products in the benchmarks: checked, compared with libraries, called once."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import once
from benchmarks.__main__ import main
from benchmarks.contenders import cublaslt
from benchmarks.measuring import files, report
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import Contender, Times
from benchmarks.suites import casts, products
from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.host import gemm_configs, gemm_measurements, gemm_selection
from cuda_kernels.host.launch import executing
from tests.benchmarks.cublaslt_stand_in import CublasLt, stand_in
from tests.benchmarks.test_benchmarks import CUBLASLT
from tests.cuda_kernels.emulated import Emulator, needs_compilers
from tests.host.test_gemm_selection import LLAMA
from tests.tiers import thorough


@pytest.fixture
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TINY_LAYERS", ())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> CublasLt:
    """cuBLASLt's stand-in, for CPU tensors."""
    api = stand_in()
    monkeypatch.setattr(cublaslt, "bindings", lambda device: api)
    made: CublasLt = api.cublasLt
    return made


@thorough
@needs_compilers
@pytest.mark.usefixtures("no_layers", "library")
def test_products_are_checked_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that run, emulated: each legal plan is right, and has its ratio to what others need."""
    monkeypatch.setattr(gemm_configs, "_SHAPES", ((1, 1, 128),))
    with executing(Emulator()):
        results = list(products.run(Plan(torch.device("cpu"), dry=True)))
    ours = [result for result in results if result.by.startswith(OURS)]
    assert len(ours) == len(products.TINY)
    assert all(result.correct for result in ours)
    assert [result.by for result in ours].count(OURS) == len(products.TINY)
    yardsticks = {"BF16", "torch._scaled_mm (fast)", "cuBLASLt (fast, fastest)"}
    assert all(result.over.keys() == yardsticks for result in ours if result.name == "fprop")
    assert all(
        result.over.keys() >= {"cuBLASLt (full, fastest)"} for result in ours if result.name == "fprop blockwise"
    )
    document = {"suites": {"products": [result.as_json() for result in results]}}
    assert f"| {OURS} |" in report._products(document["suites"]["products"])


@pytest.mark.usefixtures("no_layers")
def test_libraries_are_compared_where_no_kernel_starts(library: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's candidates are right, in each form; the fastest of a trial is timed again, beside its first."""
    times: dict[object, float] = {}  # each contender is faster than those that came before

    class Clock:
        def round(self, contenders: Sequence[Contender]) -> list[float]:
            for contender in contenders:
                contender.call()
            return [times.setdefault(contender.call, 10_000.0 - len(times)) for contender in contenders]

    monkeypatch.setattr(products, "clock_of", lambda device: Clock())
    started: list[object] = []
    with executing(lambda *launched: started.append(launched)):
        results = list(products.run(Plan(torch.device("cpu"), dry=True, kernels=False)))
    assert not started
    assert not any(result.by.startswith(OURS) for result in results)
    direct = {(result.name, result.by): result for result in results if result.by.startswith("cuBLASLt")}
    assert direct.keys() == CUBLASLT
    assert all(result.correct and result.times and result.choice is None for result in direct.values())
    for (_, by), result in direct.items():
        assert result.note == f"cuBLASLt 13.1.0, candidate {2 if 'fastest' in by else 1} of 2, 2 of which run"
    # What training would call, and `choose` may take: torch with the sums of this product, where it takes the product.
    chosen = {(result.name, result.by) for result in results if result.choice}
    assert chosen == {
        ("fprop", "torch._scaled_mm (fast)"),
        ("fprop rowwise", "torch._scaled_mm (fast)"),
        ("wgrad added in float32", "torch._scaled_mm (full)"),
    }
    assert {fast for _, fast in library.ran} == {False, True}


@pytest.mark.usefixtures("no_layers")
def test_a_wrong_result_of_a_library_is_recorded(library: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = library.matmul

    def wrong(*arguments: int) -> None:
        ctypes.c_float.from_address(arguments[2]).value = 1.5  # alpha
        multiply(*arguments)

    monkeypatch.setattr(library, "matmul", wrong)
    results = list(products.run(Plan(torch.device("cpu"), dry=True, kernels=False)))
    assert {result.correct for result in results if result.by.startswith("cuBLASLt")} == {False}
    assert all(result.correct is not False for result in results if not result.by.startswith("cuBLASLt"))


def test_the_fastest_plans_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of right ones; the package takes them on cards of that name, after what the user measured."""
    product, sizes = str(LLAMA.spec), (LLAMA.m, LLAMA.n, LLAMA.k)
    slow, fast, wrong, *_ = (choice for choice in gemm_configs.legal_choices(LLAMA) if isinstance(choice, GemmConfig))

    def timed(
        choice: gemm_configs.GemmChoice, milliseconds: float, correct: bool = True, sizes: tuple[int, int, int] = sizes
    ) -> Any:
        entry = gemm_measurements.to_json(gemm_measurements.Measurement(product, sizes, choice))
        times = Times(*[1e-3 * milliseconds] * 3, 3)
        return Result("fprop", OURS, sizes, "e4m3", correct=correct, times=times, choice=entry).as_json()

    results = [timed(slow, 2.0), timed(fast, 1.0), timed(wrong, 0.5, False), timed(slow, 3.0, sizes=(64, 64, 64))]
    measured, out = tmp_path / "run.json", tmp_path / "a-card.json"
    machine = {"machine": {"card": {"name": "A Card"}}, "suites": {"products": results}}
    files.write(machine, measured)
    assert main(["choose", str(measured), "--out", str(out)]) == 0
    monkeypatch.setattr(gemm_measurements, "shipped_file", lambda card: tmp_path / "a-card.json")
    monkeypatch.setattr(gemm_measurements, "cache_folder", lambda: tmp_path / "cache")
    gemm_measurements.measured_on.cache_clear()
    assert [(each.sizes, each.choice) for each in gemm_measurements.measured_on("A Card")] == [
        (sizes, fast),
        ((64, 64, 64), slow),
    ]
    assert gemm_selection.choose_gemm(LLAMA, gemm_measurements.measured_on("A Card")) == fast
    kept = gemm_measurements.save("A Card", [gemm_measurements.Measurement(product, sizes, wrong)])
    assert gemm_selection.choose_gemm(LLAMA, gemm_measurements.measured_on("A Card")) == wrong
    assert len(json.loads(kept.read_text())["measured"]) == 1  # ours may get better and are not kept with the user's
    gemm_measurements.measured_on.cache_clear()
    files.write({**machine, "machine": {"card": None}}, measured)
    with pytest.raises(SystemExit, match="no product that was timed on a GPU"):
        main(["choose", str(measured)])


def test_a_product_as_json() -> None:
    target = {"over BF16": 1.75, "over cuBLASLt": 1.2, "teraflops": 900.0}
    times, over = Times(1e-3, 1e-3, 1e-3, 3), {"BF16": 1.8, "cuBLASLt": 1.1}
    entry = Result("fprop", OURS, (8, 8, 8), "float8_e4m3fn", target=target, times=times, flops=10**12, over=over)
    written = entry.as_json()
    assert (written["teraflops"], written["over"]) == (1000.0, over)
    assert written["met"] == {"over BF16": True, "over cuBLASLt": False, "teraflops": True}


def test_what_a_suite_times_is_called_once() -> None:
    plan = Plan(torch.device("cpu"), dry=True)
    codes, _, codes_t, _ = once.prepared("cast + transposed", plan)()
    assert codes.shape == casts.TINY.casts[0]
    assert torch.equal(codes.t().float(), codes_t.float())
    work = products.TINY[0]
    exam = products.Exam(*products._some_rows(*products.operands(work, plan)), work.k)
    assert exam.passes(once.prepared(work.name, plan))
    with pytest.raises(ValueError, match="'norm' is not one of 'cast', "):
        once.prepared("norm", plan)


def test_a_wrong_product_is_noticed() -> None:
    left, right = products.operands(products.Work("", 40, 30, 64), Plan(torch.device("cpu")))
    exam = products.Exam(*products._some_rows(left, right), 64)
    result = left.dequantize() @ right.dequantize().t()
    assert exam.passes(result.bfloat16)
    result[-1, -1] += 0.1 * result.abs().max()
    assert not exam.passes(result.bfloat16)
