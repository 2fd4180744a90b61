"""Experts in the benchmarks: the estimate, what the docs say of it, and the suite on the CPU."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch

from benchmarks import experts_time as estimate
from benchmarks import scale_of_experts
from benchmarks.experts_time import SHAPES, committed_rates, fp8_time, least_rows
from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.suites import experts as suite
from lightning_fp8.functions.grouped import MANY_EXPERTS
from lightning_fp8.numerics.recipes import RECIPES
from tests.benchmarks.test_benchmarks import ROOT
from tests.tiers import thorough

RESULTS = ROOT / "benchmarks/results/2026-11-28-experts-computed.json"
DOCUMENT = json.loads(RESULTS.read_text())


def test_the_committed_estimate_is_that_of_the_committed_rates() -> None:
    assert DOCUMENT["rows"] == json.loads(json.dumps(list(estimate.rows(committed_rates()))))
    assert DOCUMENT["what"].startswith("computed, not measured")


def test_mixtral_by_hand() -> None:
    """Of the committed files, read by eye: 681.9 and 1,282 TFLOP/s; casts of 3,967, 4,007, 3,813 and 3,588 GB/s."""
    rows, weights, lost = 32768, 3 * 4096 * 14336, 1 + 64 / 4096
    gemm = 2 * rows * weights * lost
    bf16 = 3 * gemm / 681.9e12
    elements = rows * (4096 + 2 * 14336 + 14336 + 4096)  # x and dy of both matrices
    casts = 3 * elements / 3967e9 + 8 * weights * (3 / 4007e9 + 3 / 3813e9) + 2 * elements / 3588e9
    grouped = 2 * gemm / (0.95 * 1282e12) + gemm / 1282e12 + casts
    (row,) = (each for each in DOCUMENT["rows"] if each["name"] == SHAPES[0].name and each["recipe"] == "delayed")
    assert row["BF16, ms"] == pytest.approx(1e3 * bf16, abs=0.01)
    assert row["ms"]["grouped"] == pytest.approx(1e3 * grouped, abs=0.01)
    assert row["ms"]["loop"] == pytest.approx(1e3 * (3 * gemm / 1282e12 + casts), abs=0.01)
    host = {"loop": 8 * 10 * 21.4e-3, "grouped": 8 * 6 * 21.4e-3}
    assert {way: row["of the host, ms"][way] for way in host} == pytest.approx(host, abs=0.02)


def test_many_experts() -> None:
    """Their wgrad is in BF16, and no op is called for each of them; a loop of so many waits for the host."""
    qwen, rates = SHAPES[1], committed_rates()
    assert qwen.experts > MANY_EXPERTS
    assert fp8_time(qwen, "delayed", rates, grouped=True).host == 0
    loop = fp8_time(qwen, "delayed", rates, grouped=False)
    assert loop.host == loop.seconds > 1.5 * loop.gpu
    least = least_rows(qwen, "delayed", rates, grouped=True)
    assert least is not None
    for rows, faster in ((least, True), (least - 16, False)):
        of_rows = qwen._replace(rows=rows * qwen.experts)
        time = fp8_time(of_rows, "delayed", rates, grouped=True)
        assert (time.seconds <= estimate.bf16_time(of_rows, rates).seconds) is faster


def test_the_tables_of_the_docs() -> None:
    """Ratios to BF16 and least rows: of delayed, tensorwise, rowwise and blockwise."""
    page = (ROOT / "docs/experts.md").read_text()
    of_shape = defaultdict(list)
    for row in DOCUMENT["rows"]:
        of_shape[row["name"]].append(row)
    ways = "grouped", "grouped, weights cast once in 8 micro-batches", "loop"
    for name, found in of_shape.items():
        ratios = [" / ".join(f"{row['over BF16'][way]:.2f}" for row in found) for way in ways]
        assert f"| {name} | {found[0]['rows of an expert']:,} | {' | '.join(ratios)} |" in page
        least = [" / ".join(f"{row['least rows'][way]:,}" for row in found) for way in ("grouped", "loop")]
        assert f"| {name.partition(',')[0]} | {' | '.join(least)} |" in page
    assert f"{DOCUMENT['rates']['host'] * 1e6:.0f} µs" in page


def test_what_the_docs_say_of_one_scale() -> None:
    results = json.loads((ROOT / "benchmarks/results/2026-11-28-cpu-scale-of-experts.json").read_text())["rows"]
    page = (ROOT / "docs/experts.md").read_text()
    of_tokens = {
        (row["log2"], row["product"]): f"{row['one scale']:.4f}, {row['one each']:.4f}"
        for row in results
        if row["spread of"] == "tokens and gradients"
    }
    for log2, shown in ((0, "1"), (8, "2⁸"), (10, "2¹⁰"), (12, "2¹²")):
        assert f"| {shown} | {of_tokens[log2, 'fprop']} | {of_tokens[log2, 'wgrad']} |" in page
    for row, right in zip(scale_of_experts.rows(), results, strict=True):
        ways = "one scale", "one each"
        assert [row[way] for way in ways] == pytest.approx([right[way] for way in ways], rel=0.03)


@pytest.mark.parametrize(
    "shape", [suite.TINY[0], pytest.param(suite.TINY[1], marks=thorough)], ids=lambda each: each.name
)
def test_the_suite_on_the_cpu(shape: estimate.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", "5")
    monkeypatch.setattr(suite, "TINY", (shape,))
    of_work: dict[str, list[Result]] = defaultdict(list)
    for result in suite.run(Plan(torch.device("cpu"), dry=True)):
        of_work[result.name].append(result)
    others = {f"{OURS}, {recipe}" for recipe in ("rowwise", "blockwise", "mxfp8")}
    of_layer = {"BF16", OURS, *(f"{OURS}, {recipe}" for recipe in list(RECIPES)[1:])}
    for groups in ("balanced", "ragged"):
        for way in ("fprop", "dgrad", "wgrad"):
            found = of_work.pop(f"{way}, {shape.name}, {groups}")
            many = {f"{OURS}, many experts"} if way == "wgrad" and shape.experts > MANY_EXPERTS else set()
            torchs = {suite.TORCH} if way != "wgrad" else set()
            assert {each.by for each in found} == {"BF16", OURS, *others, *many, *torchs}
            assert all(each.correct and each.times for each in found if each.by != suite.TORCH)
            assert all("_scaled_grouped_mm" in (each.note or "") for each in found if each.by == suite.TORCH)
        found = of_work.pop(f"layer, forward and backward, {shape.name}, {groups}")
        assert {each.by for each in found} == of_layer
        assert all(each.times and each.over.get("BF16", each.by == "BF16") for each in found)
    assert not of_work


def test_groups() -> None:
    for shape in (*SHAPES, *suite.TINY):
        for ragged in (False, True):
            ends = suite.ends(shape, ragged)
            counts = ends.diff(prepend=ends.new_zeros(1))
            assert ends.dtype is torch.int32
            assert int(ends[-1]) == shape.rows
            assert bool((counts == 0).any()) is ragged
            assert int(counts.min()) >= 0


def test_a_wrong_result_is_noticed() -> None:
    offs = suite.ends(suite.TINY[0], ragged=True)
    dw = torch.zeros(4, 3, 2)
    candidate = suite._checked(
        Result("wgrad", OURS, (1,), "float8_e4m3fn"),
        lambda: dw,
        torch.ones(2, 3, 2),
        lambda y: suite._few_of_groups(y, offs),
    )
    assert candidate.result.correct is False
