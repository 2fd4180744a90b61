"""What the benchmarks write: JSON, table, README, picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import first_run
from benchmarks.__main__ import main
from benchmarks.measuring import charts, files, machine, report
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.summary import summary
from benchmarks.measuring.timing import Times
from tests.benchmarks.test_benchmarks import ROOT

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
        assert "| casts, of copy speed | 8192×8192 | cast 0.92 |" in table
        assert "training" not in table
        assert "old" not in table


def test_a_sheet_has_a_row_for_each_entry(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    files.write(document(), path)
    assert main(["table", str(path), "--csv"]) == 0
    with (tmp_path / "card.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["suite"], row["name"], row["by"]) for row in rows] == [
        (suite, entry["name"], entry["by"]) for suite, entries in document()["suites"].items() for entry in entries
    ]
    cast = rows[1]
    assert (cast["shape"], cast["ms"], cast["correct"], cast["TFLOP/s"]) == ("8192×8192", "108.7", "True", "")
    assert cast["of a copy's bandwidth"] == "0.92"
    assert cast["targets"] == "fraction_of_copy 0.9 met"
    assert rows[3]["note"] == "absent: no op norm_quantize"


def entry_of(name: str, by: str, shape: tuple[int, ...], over: dict[str, float], right: bool = True) -> dict[str, Any]:
    return {"name": name, "by": by, "shape": list(shape), "over": over, "correct": right}


def test_charts_carry_the_numbers_that_they_show(tmp_path: Path) -> None:
    run = document()
    size = (8, 8, 8)
    run["suites"] = {
        "models": [
            entry_of("training step of a Llama", "BF16", (4, 8), {}),
            entry_of("training step of a Llama", f"{OURS}, delayed", (4, 8), {"BF16": 1.25}),
            entry_of("training step of a Llama", f"{OURS}, delayed, compiled", (4, 8), {"BF16, compiled": 1.5}),
        ],
        "products": [
            entry_of("dgrad", OURS, size, {"BF16": 1.9}),
            entry_of("dgrad", f"{OURS}, 64x128", size, {"BF16": 2.1}),
            entry_of("dgrad", f"{OURS}, wrong", size, {"BF16": 3.0}, right=False),
            entry_of("dgrad", "torch._scaled_mm (fast)", size, {"BF16": 2.5}),
            entry_of("dgrad", "torch._scaled_mm (full)", size, {"BF16": 2.0}),
            entry_of("fprop", "torch._scaled_mm (fast)", size, {"BF16": 2.5}),
            entry_of("Linear, forward and backward", OURS, (8, 4, 4), {"BF16": 1.7}),
        ],
        "attention": [
            entry_of("forward", OURS, (2, 2048, 4, 64), {"cuDNN (BF16)": 0.8}),
            entry_of("forward, causal", OURS, (2, 2048, 4, 64), {"cuDNN (BF16)": 0.7}),
            entry_of("forward, causal, 4 heads to one of keys", OURS, (2, 2048, 4, 64), {"cuDNN (BF16)": 9.0}),
            entry_of("backward", OURS, (2, 4096, 4, 64), {"cuDNN (BF16)": 0.9}),
        ],
    }
    path = tmp_path / "card.json"
    files.write(run, path)
    assert main(["charts", str(path), "--out", str(tmp_path), "--name", "card"]) == 0
    assert {each.name: charts.numbers_in(each) for each in tmp_path.glob("*.png")} == {
        "card_training.png": {
            "2 Llama-8B blocks, step": {"delayed": 1.25},
            "2 Llama-8B blocks, step, compiled": {"delayed": 1.5},
            "Linear, 8×4×4": {"delayed": 1.7},
        },
        "card_products.png": {
            "dgrad\n8×8×8": {OURS: 1.9, f"{OURS}, best tile": 2.1, "torch._scaled_mm": 2.0},
            "fprop\n8×8×8": {"torch._scaled_mm": 2.5},
        },
        "card_attention.png": {
            "forward, 64 channels": {"2048": 0.8},
            "forward, causal, 64 channels": {"2048": 0.7},
            "backward, 64 channels": {"4096": 0.9},
        },
    }


@pytest.mark.parametrize("text", ["", "{begin}", "{end} {begin}", "{begin} {begin} {end}", "{begin} {end} {end}"])
def test_markers_that_are_not_there_once_in_order_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        report.insert(text.format(begin=report.BEGIN, end=report.END), "table")


def test_the_readme_takes_no_dry_run_and_no_run_without_a_card() -> None:
    with pytest.raises(ValueError, match="no dry runs"):
        summary([document(dry=True)])
    without = {**document()["machine"], "card": None}
    with pytest.raises(ValueError, match="on one GPU, not on None"):
        summary([{**document(), "machine": without}])


def test_the_readme_compares_compiled_with_compiled() -> None:
    def step(by: str, over: dict[str, float]) -> dict[str, Any]:
        return entry_of("step", by, (4, 8), over)

    runs = [document(), document()]
    runs[1]["date"] = "2026-01-03T00:00:00+00:00"
    runs[1]["suites"] = {
        "models": [
            step("BF16", {}),
            step(f"{OURS}, delayed", {"BF16": 1.25}),
            step(f"{OURS}, delayed, compiled", {"BF16, compiled": 1.5}),
        ]
    }
    lines = summary(runs).splitlines()
    assert lines[0].startswith("| FP8 on an A card, 2026-01-02 and 2026-01-03, torch 2.11.0 |")
    assert lines[2:4] == ["| step | 4×8 | delayed 1.25 |", "| step, compiled | 4×8 | delayed 1.50 |"]


def test_a_row_of_the_readme_names_its_conditions_and_is_not_wide() -> None:
    recipes = ("delayed", "tensorwise", "rowwise", "blockwise", "delayed with FP8 attention")
    named = {"name": "training step of a Llama", "shape": [4, 2048], "over": {"BF16": 1.25}, "correct": True}
    run = document()
    run["suites"] = {"models": [{**named, "by": f"{OURS}, {recipe}"} for recipe in recipes]}
    lines = summary([run]).splitlines()[2:]
    assert max(map(len, lines)) <= 130
    start = "| 2 Llama-8B blocks, step | `first_last_layers_bf16=False`, vocabulary 8,192, 4×2048 | "
    assert all(line.startswith(start) for line in lines)
    said = ", ".join(line.removeprefix(start).removesuffix(" |") for line in lines)
    assert said == ", ".join(f"{recipe} 1.25" for recipe in recipes)


def test_the_readme_has_the_bad_rows_of_attention_and_of_products_too() -> None:
    def entry(name: str, by: str, shape: list[int], ratio: float) -> dict[str, Any]:
        return {"name": name, "by": by, "shape": shape, "over": {"BF16": ratio, "cuDNN (BF16)": ratio}, "correct": True}

    attention = [
        entry(name, OURS, [16, 2048, 32, 64], ratio)
        for name, ratio in {"forward": 0.8, "backward": 0.79, "forward, causal": 0.7, "backward, causal": 0.9}.items()
    ]
    products = [
        entry("dgrad", by, [8, 8, 8], ratio)
        for by, ratio in {OURS: 1.9, f"{OURS}, 64x128": 2.05, "torch._scaled_mm (full)": 2.03}.items()
    ]
    run = document()
    run["suites"] = {"attention": attention, "products": products}
    assert summary([run]).splitlines()[2:] == [
        "| GEMM, dgrad | 8×8×8 | ours 1.90, best tile 2.05; _scaled_mm 2.03 full |",
        "| attention with casts, over cuDNN | 16×2048×32×64 | no mask: forward 0.80, backward 0.79;"
        " causal: forward 0.70, backward 0.90 |",
    ]


def test_results_of_an_earlier_version_are_refused() -> None:
    with pytest.raises(SystemExit, match="not written by this version"):
        main(["table", str(ROOT / "benchmarks/results/2026-11-21-cpu.json")])


NUMERICS = (ROOT / "benchmarks/results").glob("2026-11-22-attention-*.json")


@pytest.mark.parametrize("path", NUMERICS, ids=lambda path: path.stem)
def test_results_of_another_command_are_refused_with_its_name(path: Path) -> None:
    with pytest.raises(SystemExit, match="was written by python -m benchmarks.attention_numerics; this command reads"):
        main(["table", str(path)])


def test_results_of_a_first_run_are_refused_with_its_name(tmp_path: Path) -> None:
    first_run.main(["--out", str(tmp_path), "--stages", "choose", "--dry-run"])
    with pytest.raises(SystemExit, match="was written by python -m benchmarks.first_run; this command reads"):
        main(["table", str(tmp_path / "first_run.json")])


def test_the_picture(tmp_path: Path) -> None:
    results, picture = tmp_path / "card.json", tmp_path / "docs" / "casts.png"
    files.write(document(), results)
    assert main(["plot", str(results), str(results), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
