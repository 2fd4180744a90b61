"""The README's table: how fast FP8 is on a GPU, in times of BF16's speed in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.contenders.attention_contenders import CUDNN
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD
from benchmarks.measuring.record import OURS
from benchmarks.measuring.report import markdown

Entry = dict[str, Any]

BF16 = "BF16"
COMPILED = ", compiled"
"""Ends the names of contenders that ``torch.compile`` compiled."""
PRODUCTS = "fprop", "fprop blockwise", "wgrad blockwise"
SHAPES = [2, 16_384, 16, 128], [16, 2048, 16, 128]
"""Of attention: sequences, length, heads, channels."""
LIBRARIES = "torch._scaled_mm", "cuBLASLt"
CASTS = "cast", "cast + transposed", "1x128", "1x128 + transposed", "RMSNorm + cast"


def summary(documents: Sequence[dict[str, Any]]) -> str:
    """A row per work of all runs, which have to be of one GPU.

    Raises:
        ValueError: no run had a GPU, or they had several, or several versions of torch.
    """
    cards = {(document["machine"]["card"] or {}).get("name") for document in documents}
    if len(cards) != 1 or None in cards or any(document["arguments"]["dry_run"] for document in documents):
        raise ValueError(f"the README shows runs on one GPU, not on {', '.join(map(str, cards))}, and no dry runs")
    of_suites = {"models": _models, "products": _products, "attention": _attention, "casts": _casts}
    rows = [
        row
        for suite, rows_of in of_suites.items()
        for document in documents
        for row in rows_of(document["suites"].get(suite, []))
    ]
    torches = {document["machine"]["versions"]["torch"] for document in documents}
    if len(torches) > 1:
        raise ValueError(f"the README shows runs with one version of torch, not with {', '.join(sorted(torches))}")
    dates = " and ".join(sorted({document["date"][:10] for document in documents}))
    title = f"FP8 on an {cards.pop()}, {dates}, torch {torches.pop()}"
    return markdown((title, "size", "speedup over BF16, unless noted"), rows)


Row = tuple[str, str, str]


def _models(entries: list[Entry]) -> Iterator[Row]:
    """Of each model, all contenders that are not BF16; those that are compiled have a row of their own."""
    ours = [entry for entry in entries if entry["by"].startswith(OURS)]
    yield from _side_by_side(ours)
    compiled = [
        {**entry, "name": f"{entry['name']}{COMPILED}", "by": entry["by"].removesuffix(COMPILED)}
        for entry in ours
        if entry["by"].endswith(COMPILED)
    ]
    yield from _side_by_side(compiled, BF16 + COMPILED)


def _products(entries: list[Entry]) -> Iterator[Row]:
    """Of layers, all recipes; of products, our fastest tile and libraries' fastest."""
    yield from _side_by_side(entry for entry in entries if _is_layer(entry) and entry["by"].startswith(OURS))
    for name in PRODUCTS:
        named = [entry for entry in entries if entry["name"] == name and _ratio(entry, BF16)]
        fastest = [
            (by, max(ratios))
            for by in (OURS, *LIBRARIES)
            if (ratios := [_ratio(entry, BF16) or 0.0 for entry in named if entry["by"].startswith(by)])
        ]
        if fastest:
            yield f"GEMM, {name}", _size(named[0]), ", ".join(f"{by} {ratio:.2f}" for by, ratio in fastest)


def _attention(entries: list[Entry]) -> Iterator[Row]:
    """The whole ops, with their casts, at 128 channels, relative to cuDNN."""
    rows: dict[str, list[str]] = {}
    for entry in entries:
        ratio = _ratio(entry, CUDNN)
        if entry["by"] == OURS and ratio and entry["name"] in (FORWARD, BACKWARD) and entry["shape"] in SHAPES:
            rows.setdefault(_size(entry), []).append(f"{entry['name']} {ratio:.2f}")
    for size, ratios in rows.items():
        yield "attention including casts, relative to cuDNN in BF16", size, ", ".join(ratios)


def _casts(entries: list[Entry]) -> Iterator[Row]:
    """Shares of a copy's bandwidth."""
    first = {entry["name"]: entry for entry in reversed(entries) if entry["by"] == OURS and entry["fraction_of_copy"]}
    shares = [f"{name} {first[name]['fraction_of_copy']:.2f}" for name in CASTS if name in first]
    if shares:
        yield "casts, as a fraction of a memory copy's bandwidth", _size(first[CASTS[0]]), ", ".join(shares)


def _side_by_side(entries: Iterable[Entry], other: str = BF16) -> Iterator[Row]:
    """A row per work: how much faster than ``other`` all contenders are."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        ratio = _ratio(entry, other)
        if ratio:
            recipe = entry["by"].removeprefix(OURS).removeprefix(", ") or "delayed"
            rows.setdefault((entry["name"], _size(entry)), []).append(f"{recipe} {ratio:.2f}")
    for (name, size), ratios in rows.items():
        yield name, size, ", ".join(ratios)


def _is_layer(entry: Entry) -> bool:
    return entry["name"].endswith("Linears, forward and backward")


def _ratio(entry: Entry, other: str) -> float | None:
    """How much faster than ``other``, if the result was right."""
    return None if entry["correct"] is False else (entry["over"] or {}).get(other)


def _size(entry: Entry) -> str:
    return "×".join(map(str, entry["shape"]))
