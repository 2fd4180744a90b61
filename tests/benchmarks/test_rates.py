"""The rates that ship are those of the committed results, and give the sizes that were read off them by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.rates import CASTS, read
from cuda_kernels.host.gemm_measurements import rates_file
from lightning_fp8 import faster

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = ("2026-11-27-h200-attention.json", "2026-11-26-h200-products.json", "2026-11-27-h200-casts.json")
CARD = "NVIDIA H200"


def test_what_ships_is_computed_from_the_results() -> None:
    assert json.loads(rates_file(CARD).read_text()) == read(RESULTS / name for name in FILES)


@pytest.mark.parametrize(
    ("recipe", "least"), [("delayed", 260), ("tensorwise", 380), ("rowwise", 410), ("blockwise", 400)]
)
def test_break_even_of_linear_layers(recipe: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / (1/M + 1/N + 1/K) from which FP8 is faster, of cubes."""
    monkeypatch.setattr(faster, "name_of", lambda device: CARD)
    rows, _ = faster.least_rows(torch.device("cpu"), recipe, 3 * least, 3 * least)
    assert rows == pytest.approx(3 * least, rel=0.1)
    assert faster.least_rows(torch.device("cpu"), recipe, 64, 65536)[0] == math.inf


@pytest.mark.parametrize("fit", json.loads(rates_file(CARD).read_text())["attention"], ids=lambda fit: str(fit)[:60])
def test_attentions_fit_is_near_what_was_measured(fit: dict[str, object]) -> None:
    results = json.loads((RESULTS / FILES[0]).read_text())["suites"]["attention"]
    options = ", causal" * bool(fit["causal"]) + ", 4 heads to one of keys" * bool(fit["shared"])
    for by, side in (("cuDNN (BF16)", "cudnn"), ("flash (BF16)", "flash"), ("lightning_fp8", "fp8")):
        times: dict[int, float] = {}
        for each in results:
            if each["by"] == by and each["name"] in (f"forward{options}", f"backward{options}"):
                batch, length, heads, channels = each["shape"]
                if channels == fit["channels"]:
                    of_query = each["milliseconds"]["median"] * 1e6 / (batch * length * heads)
                    times[length] = times.get(length, 0) + of_query
        fixed, tile = fit[side]  # type: ignore[misc]
        assert len(times) >= 2
        for length, time in times.items():
            assert fixed + tile * length / 128 == pytest.approx(time, rel=0.06)


def test_the_tables_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "name_of", lambda device: CARD)
    monkeypatch.setattr(faster, "_back_end", lambda *_: "cudnn")
    docs, cpu = RESULTS.parents[1] / "docs", torch.device("cpu")

    def said(limits: list[tuple[float, str]], of: str = "") -> str:
        words = {math.inf: "never", 0: "always"}
        return " | ".join(words.get(least, f"from {least:,} {of}" if of else f"{least:,}") for least, _ in limits)

    delayed: list[float] = []
    for n, k in ((4096, 4096), (2048, 2048), (512, 2048), (512, 512)):
        limits = [faster.least_rows(cpu, recipe, n, k) for recipe in CASTS]
        assert f"| {n:,} × {k:,} | {said(limits)} |" in (docs / "models.md").read_text()
        delayed.append(limits[0][0])
    assert delayed.pop() == math.inf
    assert (
        "4,096 × 4,096 is faster with delayed scaling from {:,} tokens per micro-batch on, "
        "one of 2,048 × 2,048 from {:,} on, one of 512 × 2,048 from {:,} on, and one of 512 × 512 never".format(
            *delayed
        )
    ) in " ".join((docs / "faq.md").read_text().split())
    for channels in (64, 96, 128, 256):
        masks = ((False, False), (True, False), (True, True))
        limits = [faster.least_keys(cpu, torch.bfloat16, channels, *mask) for mask in masks]
        row = f"| {channels}{' (estimated)' * (channels == 96)} | {said(limits, 'keys')} |"
        assert row in (docs / "attention.md").read_text()
