"""A whole run of the benchmarks, and runs that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.contenders import operations
from benchmarks.contenders.operations import Operation
from benchmarks.measuring import report
from benchmarks.measuring.record import OURS, Result
from benchmarks.suites import casts, host
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.cast import quantize_op
from tests.tiers import thorough

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
        "cast by columns' scales",
        "transpose of codes",
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
WAYS = "forward", "backward"
PEERS = {
    *(("cast", by) for by in ("torch", "torch, without a scale", "torch.compile", "triton")),
    *(("cast + transposed", by) for by in ("torch", "torch.compile")),
    *(("1x128", by) for by in ("torch.compile", "triton")),
    ("transpose of codes", "torch"),
    ("copy", "torch"),
}


# --- A whole run ------------------------------------------------------------------------------------------------------


@thorough
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

    yardstick, *others = document["suites"]["host"]
    assert (yardstick["by"], yardstick["parts"]) == ("torch", None)
    host = {e["name"]: e for e in others if e["parts"]}
    of_layers = {(e["name"], e["by"]): e for e in others if not e["parts"]}
    ours = OURS, f"{OURS}, tensorwise"
    assert of_layers.keys() == {
        *((f"Linear {way}", by) for way in WAYS for by in (*ours, "torch.autograd alone")),
        *((f"Linear step {way}", by) for way in WAYS for by in (*ours, "torch", "torchao, emulated")),
        *((f"Llama block {way}", by) for way in WAYS for by in ("torch", f"{OURS}, not fused", f"{OURS}, fused")),
    }
    installed = find_spec("torchao") is not None
    for (_, by), entry in of_layers.items():
        there = installed or not by.startswith("torchao")
        assert (entry["host_microseconds"] is not None) == there
        assert entry["note"] == (None if there else "torchao is not installed")
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
    cast = Cast(E4M3, Layout.ROW)
    broken = Operation("cast", quantize_op, E4M3.dtype, lambda x: (x, cast, torch.ones(()), None))
    monkeypatch.setattr(operations, "casts", lambda dtype: [broken])
    path = tmp_path / "out.json"
    assert main(["--dry-run", "--only", "casts", "--json", str(path)]) == 1
    entries = {e["name"]: e for e in json.loads(path.read_text())["suites"]["casts"]}
    assert entries["cast"]["correct"] is False
    assert entries["cast"]["milliseconds"] is None
    assert (
        entries["cast"]["note"]
        == "ValueError: layout 'row' computes the scale of each block from its values; scale must be None"
    )
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
