"""What the benchmarks compute and write. None of these tests measures time."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from benchmarks import casts, check, cublaslt, files, host, machine, once, operations, products, report, timing
from benchmarks.__main__ import main
from benchmarks.operations import Call, Operation
from benchmarks.plan import Plan
from benchmarks.record import OURS, Result
from benchmarks.timing import Contender, CudaClock, HostClock, Times, measure
from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.host import gemm_configs, gemm_measurements, gemm_selection
from lightning_fp8.recipes import RECIPES
from tests.benchmarks.cublaslt_stand_in import CublasLt, stand_in
from tests.cuda_kernels.emulated import Emulator, executing, needs_compilers
from tests.host.test_gemm_selection import LLAMA

ROOT = Path(__file__).parents[2]

LAYOUTS = ("current scaling", "row", "1x128", "128x128", "1x32")
CASTS = {
    *(
        "cast",
        "cast, scale may be 0",
        "cast + amax",
        "cast + transposed",
        "cast + transposed + amax",
        "transposed only",
    ),
    *LAYOUTS,
    *(f"{layout} + transposed" for layout in LAYOUTS),
}
FUSED = {
    *(f"{norm} + cast{copies}" for norm in ("RMSNorm", "LayerNorm", "SwiGLU") for copies in ("", " + transposed")),
    *("RMSNorm backward", "SwiGLU backward + cast + transposed"),
}
"""Where the ops are there."""
PRODUCTS = {
    *(
        (work, by)
        for work in ("fprop", "fprop rowwise", "wgrad added in float32")
        for by in ("BF16", "torch._scaled_mm (fast)", "torch._scaled_mm (full)")
    ),
    ("fprop blockwise", "BF16"),
    *(("Linear, forward and backward", by) for by in ("BF16", OURS, f"{OURS}, blockwise")),
}
"""Where no kernel multiplies."""
CUBLASLT = {
    *(
        (work, f"cuBLASLt ({sums}, {which})")
        for work in ("fprop", "fprop rowwise", "wgrad added in float32")
        for sums in ("fast", "full")
        for which in ("first", "fastest")
    ),
    *(("fprop blockwise", f"cuBLASLt (full, {which})") for which in ("first", "fastest")),
}
"""Where the library is there."""
RUNS = ["bf16", *RECIPES]
PEERS = {
    *(("cast", by) for by in ("torch", "torch, without a scale", "torch.compile", "triton")),
    *(("cast + transposed", by) for by in ("torch", "torch.compile")),
    *(("1x128", by) for by in ("torch.compile", "triton")),
    ("copy", "torch"),
}


# --- A whole run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_walks_everything(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", "--dry-run", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert not document["errors"]
    assert document["arguments"] == {"only": None, "dry_run": True, "libraries": False}
    assert Version(document["machine"]["versions"]["torch"]).release == Version(torch.__version__).release

    entries = document["suites"]["casts"]
    ours = {(e["name"], e["dtype"], *e["shape"]) for e in entries if e["by"] == OURS and e["milliseconds"]}
    for shape in casts.TINY.casts:
        wanted = {(name, dtype, *shape) for name in CASTS for dtype in ("float8_e4m3fn", "float8_e5m2")}
        assert wanted <= ours, wanted - ours
        assert ("observe", "bfloat16", *shape) in ours
    assert {name[2:] for name in ours if name[0] == "update_scales"} == set(casts.TINY.windows)
    assert {(e["name"], e["by"]) for e in entries} >= PEERS | {(name, OURS) for name in FUSED}
    assert all(e["milliseconds"] or e["note"].startswith("absent") for e in entries)
    assert all(e["correct"] for e in entries if e["by"] == OURS and e["milliseconds"])
    assert all(e["correct"] in (True, None) for e in entries)

    timed = {(e["name"], e["by"]) for e in document["suites"]["products"] if e["milliseconds"]}
    assert timed >= PRODUCTS
    assert all(e["milliseconds"] or e["note"] for e in document["suites"]["products"])
    assert all(e["correct"] in (True, None) for e in document["suites"]["products"])
    direct = [e["note"] for e in document["suites"]["products"] if e["by"].startswith("cuBLASLt")]
    assert direct
    assert all("needs a CUDA device" in note for note in direct)

    for suite in ("attention", "hardware"):
        assert all(e["milliseconds"] or e["note"] for e in document["suites"][suite])
        assert all(e["correct"] in (True, None) for e in document["suites"][suite])
    assert any(e["by"] == OURS and e["correct"] for e in document["suites"]["attention"])

    yardstick, *ours = document["suites"]["host"]
    assert (yardstick["by"], yardstick["parts"]) == ("torch", None)
    host = {e["name"]: e for e in ours}
    products = {"product", "product, 1x128", "product, accumulated"}
    assert host.keys() - FUSED == {*CASTS, *products, "observe", "update_scales"}
    assert all(e["parts"].keys() == {"dispatch", "allocation", "launch", "python"} for e in host.values())
    assert [e["name"].split(", ")[1] for e in document["suites"]["training"]] == RUNS
    assert "1x128 + transposed" in done.stdout


@pytest.fixture
def few_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite ``casts`` on one shape, without peers."""
    monkeypatch.setattr(casts, "TINY", casts.Sizes(((256, 256),), 128, ((8, 10),), (2**12,)))
    monkeypatch.setattr(casts, "peers", lambda: [])


@pytest.mark.usefixtures("few_casts")
def test_a_wrong_result_is_recorded_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = casts.reference_outcome

    def one_code_off(operation: Operation, x: Tensor) -> list[Tensor]:
        outcome = right(operation, x)
        if operation.name == "1x128":
            outcome[0].view(torch.uint8)[-1, -1] ^= 1
        return outcome

    monkeypatch.setattr(casts, "reference_outcome", one_code_off)
    path = tmp_path / "out.json"
    assert main(["--dry-run", "--only", "casts", "--json", str(path)]) == 1
    entries = json.loads(path.read_text())["suites"]["casts"]
    assert {e["name"] for e in entries if e["correct"] is False} == {"1x128"}
    assert "1x128, **wrong**" in report.table(json.loads(path.read_text()))


@pytest.mark.usefixtures("few_casts")
def test_an_op_that_raises_leaves_the_others_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Operation("cast", "quantize", torch.float8_e4m3fn, lambda x: {"x": x, "options": "no cast"})
    absent = Operation("norm", "no_such_op", torch.float8_e4m3fn, lambda x: {"x": x})
    monkeypatch.setattr(operations, "casts", lambda dtype: [broken, absent])
    path = tmp_path / "out.json"
    assert main(["--dry-run", "--only", "casts", "--json", str(path)]) == 1
    entries = {e["name"]: e for e in json.loads(path.read_text())["suites"]["casts"]}
    assert entries["cast"]["correct"] is False
    assert entries["cast"]["milliseconds"] is None
    assert entries["norm"]["correct"] is None
    assert entries["norm"]["note"] == "absent: no op no_such_op"
    assert entries["observe"]["correct"] is True


@pytest.mark.usefixtures("few_casts")
def test_a_suite_that_breaks_off_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: Any) -> Any:
        yield Result("cast", OURS, (256, 256), "float8_e4m3fn", host_microseconds=9.0, parts={"packing": 2.0})
        raise RuntimeError("out of memory")

    monkeypatch.setattr(host, "run", run)
    path = tmp_path / "out.json"
    assert main(["--dry-run", "--only", "host,casts", "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert document["errors"]["host"].splitlines()[-1] == "RuntimeError: out of memory"
    assert len(document["suites"]["host"]) == 1
    assert len(document["suites"]["casts"]) > 30


def test_a_suite_that_cannot_run_here_is_an_error_only_where_it_was_asked_for() -> None:
    if torch.cuda.is_available():
        pytest.skip("every suite can run here")
    assert main(["--only", "casts"]) == 1
    with pytest.raises(SystemExit):
        main(["--only", "cast"])


# --- What is computed -------------------------------------------------------------------------------------------------


def outcome_bytes(name: str, shape: tuple[int, int]) -> int:
    (operation,) = (each for each in operations.casts(torch.float8_e4m3fn) if each.name == name)
    return Call(operation, torch.randn(shape).bfloat16()).bytes()


def test_bytes_that_must_move() -> None:
    # x and scale are read, codes and scale_inv written
    assert outcome_bytes("cast", (128, 256)) == 128 * 256 * 2 + 4 + 128 * 256 + 4
    # ... and amax is both; the second copy has the same scale
    assert outcome_bytes("cast + transposed + amax", (128, 256)) == 128 * 256 * 2 + 4 + 4 + 2 * 128 * 256 + 4 + 4
    assert outcome_bytes("transposed only", (128, 256)) == 128 * 256 * 2 + 4 + 128 * 256 + 4
    assert outcome_bytes("current scaling", (128, 256)) == 128 * 256 * 2 + 128 * 256 + 4
    # ragged: 200 columns are seven blocks of 32 or two of 128; 100 rows are four or one
    assert outcome_bytes("1x32 + transposed", (100, 200)) == 100 * 200 * (2 + 1 + 1) + 100 * 7 + 200 * 4
    assert outcome_bytes("1x128 + transposed", (100, 200)) == 100 * 200 * (2 + 1 + 1) + 4 * (100 * 2 + 200 * 1)
    assert outcome_bytes("128x128", (100, 200)) == 100 * 200 * (2 + 1) + 4 * 1 * 2
    # amax, amax_history, scale and fp8_max are read; all but the last are written
    update = Call(operations.update_scales({}), torch.randn(8, 10))
    assert update.bytes() == 4 * (10 + 80 + 10 + 10) + 4 * (10 + 80 + 10)


def test_a_call_repeats_its_first_one() -> None:
    update = Call(operations.update_scales({}), torch.randn(8, 10))
    first = [tensor.clone() for tensor in update.outcome()]
    assert all(map(torch.equal, first, update.outcome()))
    update()  # now amax is 0, and nothing is left to do
    assert all(map(torch.equal, first, update.outcome()))


def test_results_are_compared_to_the_bit_over_and_over() -> None:
    few = torch.randn(4, 6).to(torch.float8_e4m3fn)
    whole = few.view(torch.uint8).repeat(3, 1)
    assert check.same(whole.view(few.dtype), few)
    assert check.same(whole.t().contiguous().t().view(few.dtype), few)
    whole[11, 5] ^= 0x80
    assert not check.same(whole.view(few.dtype), few)
    assert not check.same(few.to(torch.float8_e5m2), few)
    assert not check.same(few[:3], few)
    assert check.same(torch.tensor(1.5), torch.tensor(1.5))
    assert not check.same(torch.tensor(0.0), torch.tensor(-0.0))
    assert check.same(torch.empty(0), torch.empty(0))


def test_results_may_be_close_where_rounding_differs() -> None:
    few = torch.arange(1.0, 21.0).reshape(4, 5)
    whole = few.repeat(5, 1)
    whole[0, 0] *= 1 + 2**-20
    assert not check.same(whole, few)
    assert check.close(whole, few, share=1.0)
    whole[0, 0] *= 1.1
    assert not check.close(whole, few, share=1.0)
    assert check.close(whole, few, share=0.99)
    assert not check.close(whole * torch.nan, few, share=0.01)
    one, next_code = (torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn) for code in (0x38, 0x39))
    assert not check.close(one, next_code, share=0.1)
    assert check.close(torch.empty(0), torch.empty(0), share=1.0)


def test_results_are_checked_in_memory_that_held_nan() -> None:
    buffer = torch.empty(8, dtype=torch.float8_e4m3fn)

    def fills_half() -> list[Tensor]:
        buffer[:4] = 1.0
        return [buffer]

    buffer.fill_(1.0)  # left by an earlier call
    assert fills_half()[0].float().eq(1.0).all()
    (result,) = check.poisoned(fills_half)
    assert result[:4].float().eq(1.0).all()
    assert result[4:].float().isnan().all()


# --- Timing -----------------------------------------------------------------------------------------------------------


class ScriptedClock:
    """Takes its seconds from a table, a row for each round, and runs the contenders."""

    def __init__(self, rounds: Sequence[Sequence[float]]) -> None:
        self.rounds = iter(rounds)

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        for contender in contenders:
            contender.prepare()
            contender.call()
        return list(next(self.rounds))


def test_median_and_quartiles() -> None:
    assert Times.of([4.0, 1.0, 3.0, 2.0, 100.0]) == Times(median=3.0, low=2.0, high=4.0, count=5)
    assert Times(8.0, 4.0, 12.0, 7) / 4 == Times(2.0, 1.0, 3.0, 7)


def test_contenders_alternate_and_the_first_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 3)
    order: list[str] = []
    contenders = [Contender(lambda name=name: order.append(name)) for name in "ab"]
    clock = ScriptedClock([(100, 100), (100, 100), (1, 10), (2, 30), (3, 20)])
    assert measure(clock, contenders, seconds=0) == [Times(2, 1.5, 2.5, 3), Times(20, 15, 25, 3)]
    assert "".join(order) == "ab" * 5


def test_rounds_fill_the_seconds_of_all_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 0)
    ticks = iter(range(1000))
    clock = ScriptedClock([(1, 1)] * 1000)
    first, _ = measure(clock, [Contender(lambda: None)] * 2, seconds=10, now=lambda: next(ticks))
    assert first.count == 20 + timing.LEAST_ROUNDS - 1  # the least rounds do not ask for the time
    monkeypatch.setattr(timing, "MOST_ROUNDS", 7)
    first, _ = measure(clock, [Contender(lambda: None)] * 2, seconds=1e9)
    assert first.count == 7


def test_preparation_is_outside_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> Callable[[], None]:
        def wait() -> None:
            nonlocal now
            now += seconds

        return wait

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    contenders = [Contender(pass_time(2.0), prepare=pass_time(100.0)), Contender(pass_time(3.0))]
    assert HostClock().round(contenders) == [2.0, 3.0]
    (times,) = timing.measure_on_host([pass_time(0.5)], 0.0, torch.device("cpu"))
    assert times.median == 0.5


def test_the_device_is_timed_between_events_behind_a_cold_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    real_sum = torch.sum
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch, "sum", lambda *args, **named: (log.append("flush"), real_sum(*args, **named)))
    clock = CudaClock(torch.device("cpu"))
    assert clock.round([Contender(lambda: log.append("call"), lambda: log.append("prepare"))] * 2) == [0.25, 0.25]
    assert log == ["prepare", "flush", "event", "call", "event"] * 2 + ["wait"]


# --- What is written --------------------------------------------------------------------------------------------------


def test_a_result_as_json() -> None:
    target = {"fraction_of_copy": 0.9, "host_microseconds": 8.0, "milliseconds": 0.02}
    times = Times(2e-3, 1e-3, 4e-3, 11)
    errors = {"dq": 0.0123456}
    result = Result("cast", OURS, (8, 8), "float8_e4m3fn", 10**9, True, errors, target, times, 1e12, 7.123456)
    assert result.as_json() == {
        "name": "cast",
        "by": "lightning_fp8",
        "shape": [8, 8],
        "dtype": "float8_e4m3fn",
        "milliseconds": {"median": 2.0, "low": 1.0, "high": 4.0, "count": 11},
        "bytes": 10**9,
        "gigabytes_per_second": 500.0,
        "fraction_of_copy": 0.5,
        "teraflops": None,
        "over": None,
        "host_microseconds": 7.123,
        "parts": None,
        "correct": True,
        "errors": {"dq": 0.01235},
        "target": target,
        "met": {"fraction_of_copy": False, "host_microseconds": True, "milliseconds": False},
        "note": None,
        "choice": None,
    }
    untimed = Result("cast", OURS, (8, 8), "float8_e4m3fn", target=target, note="absent").as_json()
    assert untimed["met"] == dict.fromkeys(target)


def test_a_failed_write_leaves_the_last_version(tmp_path: Path) -> None:
    path = tmp_path / "results" / "out.json"
    files.write({"date": 1}, path)
    with pytest.raises(TypeError):
        files.write({"date": object()}, path)
    assert json.loads(path.read_text()) == {"date": 1}
    assert list(path.parent.iterdir()) == [path]


def test_the_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="A card", major=9, minor=0, multi_processor_count=132, total_memory=2**37, L2_cache_size=2**20, uuid="ab-c"
    )
    asked: list[str] = []

    def output(*command: str) -> str:
        asked.extend(command)
        return "580.1, 1980, 3201, 700.00"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "_output", output)
    card = machine.describe()["card"]
    assert card["name"] == "A card"
    assert card["driver_version"] == "580.1"
    assert card["power.limit"] == "700.00"
    assert asked[:2] == ["nvidia-smi", "--id=GPU-ab-c"]


def document(dry: bool = False) -> dict[str, Any]:
    """A run's results, made up."""

    def entry(
        name: str, by: str, shape: tuple[int, int], dtype: str, milliseconds: float, **more: Any
    ) -> dict[str, Any]:
        times = Times(milliseconds / 1e3, milliseconds / 1.1e3, milliseconds / 0.9e3, 9)
        numbers: dict[str, Any] = {"bytes": 10**8, "times": times, "copy_bandwidth": 10**9}
        return Result(name, by, shape, dtype, **{**numbers, **more}).as_json()

    e4m3, wide = "float8_e4m3fn", (16384, 4096)
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "machine": {
            "card": {"name": "A card", "driver_version": "580.1"},
            "versions": {"torch": "2.11.0", "numba-cuda": "0.30.4"},
            "sources": "feed",
        },
        "arguments": {"only": None, "dry_run": dry},
        "suites": {
            "casts": [
                entry("copy", "torch", (8192, 8192), "bfloat16", 100.0),
                entry("cast", OURS, (8192, 8192), e4m3, 108.7, target={"fraction_of_copy": 0.9}, correct=True),
                entry("cast", OURS, (8192, 8192), "float8_e5m2", 109.9),
                entry("norm", OURS, (8192, 8192), e4m3, 1.0, times=None, note="absent: no op norm_quantize"),
                entry("cast", OURS, wide, e4m3, 125.0),
                entry("cast", "torch", (8192, 8192), e4m3, 400.0),
            ],
            "training": [entry("training step, bf16", "torch", (16, 129), "bfloat16", 200.0)],
        },
        "errors": {"host": "Traceback\nValueError: no"},
    }


def test_the_table() -> None:
    text = report.table(document())
    lines = text.splitlines()
    assert (
        lines[0]
        == "A card, driver 580.1, torch 2.11.0, numba-cuda 0.30.4, commit 0123456789, 2026-01-02T03:04:05+00:00"
    )
    cast = next(index for index, line in enumerate(lines) if line.startswith("| cast | lightning_fp8"))
    assert lines[cast] == (
        "| cast | lightning_fp8 | 108.7000 (98.8200 – 120.8000) | 1 | 0.92 | 0.80 | 0.91 |  | ✓ of copy ≥ 0.9 |"
    )
    assert lines[cast + 1].startswith("| cast | torch | 400.0000")
    assert "other shapes: [16384, 4096]" in text
    assert "| norm | lightning_fp8 | absent: no op norm_quantize |" in text
    assert "| training step, bf16 | 200.0 (181.8 – 222.2) | 1.00 |" in text
    assert "**host broke off**: ValueError: no" in text
    assert "Dry run" in report.table(document(dry=True))


def test_the_readme_is_changed_between_its_markers_only(tmp_path: Path) -> None:
    results, readme = tmp_path / "card.json", tmp_path / "README.md"
    files.write(document(), results)
    readme.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end, without a newline")
    for _ in range(2):
        assert main(["table", str(results), "--readme", str(readme)]) == 0
        before, _, rest = readme.read_text().partition(f"{report.BEGIN}\n")
        table, _, after = rest.partition(f"\n{report.END}")
        assert before == "# Title\n\n"
        assert after == "\n\nThe end, without a newline"
        assert "| cast | lightning_fp8 |" in table
        assert "training" not in table
        assert "old" not in table


@pytest.mark.parametrize("text", ["", "{begin}", "{end} {begin}", "{begin} {begin} {end}", "{begin} {end} {end}"])
def test_markers_that_are_not_there_once_in_order_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text.format(begin=report.BEGIN, end=report.END), "table")


def test_the_readme_takes_no_dry_run_and_no_run_without_a_card() -> None:
    with pytest.raises(ValueError, match="ran on a card"):
        report.readme_table(document(dry=True))
    with pytest.raises(ValueError, match="ran on a card"):
        report.readme_table({**document(), "suites": {}})


def test_results_of_an_earlier_version_are_refused() -> None:
    with pytest.raises(SystemExit, match="not written by this version"):
        main(["table", str(ROOT / "benchmarks/results/2026-11-21-cpu.json")])


def test_the_picture(tmp_path: Path) -> None:
    results, picture = tmp_path / "card.json", tmp_path / "docs" / "casts.png"
    files.write(document(), results)
    assert main(["plot", str(results), str(results), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


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


@needs_compilers
@pytest.mark.usefixtures("no_layers", "library")
def test_products_are_checked_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that run, emulated: each legal plan is right, and has its ratio to what others need."""
    monkeypatch.setattr(gemm_configs, "_SHAPES", ((1, 1, 64, False),))
    with executing(Emulator()):
        results = list(products.run(Plan(torch.device("cpu"), dry=True)))
    ours = [result for result in results if result.by.startswith(OURS)]
    assert len(ours) == 2 * len(products.TINY)  # a tile alone and in clusters
    assert all(result.correct for result in ours)
    assert [result.by for result in ours].count(OURS) == len(products.TINY)
    yardsticks = {"BF16", "torch._scaled_mm (fast)", "cuBLASLt (fast, fastest)"}
    assert all(result.over.keys() == yardsticks for result in ours if result.name == "fprop")
    assert all(
        result.over.keys() >= {"cuBLASLt (full, fastest)"} for result in ours if result.name == "fprop blockwise"
    )
    document = {"suites": {"products": [result.as_json() for result in results]}}
    assert "64x64" in report._products(document["suites"]["products"])


@pytest.mark.usefixtures("no_layers")
def test_libraries_are_compared_where_no_kernel_starts(library: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's candidates are right, in each form; the fastest of a trial is timed again, beside its first."""
    times = iter(range(10_000, 0, -1))  # each call is faster than the one before

    class Clock:
        def round(self, contenders: Sequence[Contender]) -> list[float]:
            for contender in contenders:
                contender.call()
            return [float(next(times)) for _ in contenders]

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
    with pytest.raises(SystemExit, match="no product that was timed on a card"):
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
    left, right = (products.operand(rows, work.k, "tensor", plan) for rows in (work.m, work.n))
    assert products._close(once.prepared(work.name, plan)(), products._some_rows(left, right))
    with pytest.raises(ValueError, match="'norm' is none of 'cast', "):
        once.prepared("norm", plan)


def test_a_wrong_product_is_noticed() -> None:
    left, right = (products.operand(rows, 64, "tensor", Plan(torch.device("cpu"))) for rows in (40, 30))
    exact = products._some_rows(left, right)
    result = left.dequantize() @ right.dequantize().t()
    assert products._close(result.bfloat16(), exact)
    result[-1, -1] += 0.1 * result.abs().max()
    assert not products._close(result.bfloat16(), exact)
