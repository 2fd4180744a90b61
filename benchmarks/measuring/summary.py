"""README's table: how fast FP8 is on a GPU, in times of BF16's speed in the same run, with its conditions."""

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
CONDITIONS = {
    "training step of a Llama": (
        "2 Llama-8B blocks, step",
        "`first_last_layers_bf16=False`, vocabulary 8,192, 4×2048",
    ),
    "Llama-8B layer's Linears, forward and backward": (
        "a Llama-8B layer's Linears",
        "both passes with casts, 8192 tokens",
    ),
}
"""Of a work by its name: a short name, and under which conditions it is measured. Others have their sizes."""
PRODUCTS = "fprop", "dgrad", "fprop blockwise", "wgrad blockwise"
LIBRARIES = "torch._scaled_mm", "cuBLASLt"
ACCUMULATORS = "fast", "full"
SHAPES = [2, 16_384, 16, 128], [16, 2048, 16, 128], [2, 16_384, 32, 64], [16, 2048, 32, 64]
"""Of attention: sequences, length, heads, channels."""
PASSES = FORWARD, BACKWARD
CAUSAL = ", causal"
CASTS = "cast", "cast + transposed", "current scaling", "row", "1x128 + transposed"
"""Of each way to scale at least one, also those that read the tensor twice."""
WIDTH = 130
"""Of a row, in characters."""


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
    return markdown((title, "conditions", "times as fast as BF16, unless noted"), rows)


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
    """Of layers, all recipes; of products, our tiles and libraries by accumulator."""
    yield from _side_by_side(entry for entry in entries if _is_layer(entry) and entry["by"].startswith(OURS))
    for name in PRODUCTS:
        ratios = {entry["by"]: ratio for entry in entries if entry["name"] == name and (ratio := _ratio(entry, BF16))}
        sizes = [_size(entry) for entry in entries if entry["name"] == name]
        ours = [ratio for by, ratio in ratios.items() if by.startswith(OURS)]
        if ours:
            parts = [f"ours {ratios[OURS]:.2f}, best tile {max(ours):.2f}"]
            for library in LIBRARIES:
                fastest = {
                    accumulator: max(of)
                    for accumulator in ACCUMULATORS
                    if (of := [ratio for by, ratio in ratios.items() if by.startswith(f"{library} ({accumulator}")])
                }
                if fastest:
                    library = library.removeprefix("torch.")
                    parts.append(f"{library} {', '.join(f'{ratio:.2f} {each}' for each, ratio in fastest.items())}")
            yield f"GEMM, {name}", sizes[0], "; ".join(parts)


def _attention(entries: list[Entry]) -> Iterator[Row]:
    """The whole ops, with their casts, relative to cuDNN, without a mask and with a causal one."""
    ratios = {
        (entry["name"], tuple(entry["shape"])): ratio
        for entry in entries
        if entry["by"] == OURS and (ratio := _ratio(entry, CUDNN))
    }
    for shape in SHAPES:
        parts = [
            f"{'causal' if mask else 'no mask'}: {', '.join(f'{each} {ratio:.2f}' for each, ratio in passes.items())}"
            for mask in ("", CAUSAL)
            if (passes := {each: ratios[key] for each in PASSES if (key := (each + mask, tuple(shape))) in ratios})
        ]
        if parts:
            yield "attention with casts, over cuDNN", "×".join(map(str, shape)), "; ".join(parts)


def _casts(entries: list[Entry]) -> Iterator[Row]:
    """Shares of a copy's bandwidth."""
    first = {entry["name"]: entry for entry in reversed(entries) if entry["by"] == OURS and entry["fraction_of_copy"]}
    shares = [f"{name} {first[name]['fraction_of_copy']:.2f}" for name in CASTS if name in first]
    if shares:
        yield from _rows("casts, of copy speed", _size(first[CASTS[0]]), shares)


def _side_by_side(entries: Iterable[Entry], other: str = BF16) -> Iterator[Row]:
    """Rows per work: how much faster than ``other`` all contenders are; a row is not wider than :data:`WIDTH`."""
    works: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        ratio = _ratio(entry, other)
        if ratio:
            name, compiled, _ = entry["name"].partition(COMPILED)
            what, conditions = CONDITIONS.get(name, (name, _size(entry)))
            recipe = entry["by"].removeprefix(OURS).removeprefix(", ") or "delayed"
            works.setdefault((f"{what}{compiled}", conditions), []).append(f"{recipe} {ratio:.2f}")
    for (what, conditions), ratios in works.items():
        yield from _rows(what, conditions, ratios)


def _rows(what: str, conditions: str, ratios: Sequence[str]) -> Iterator[Row]:
    """As few rows as hold ``ratios`` and are not wider than :data:`WIDTH`."""
    room = WIDTH - len(f"| {what} | {conditions} |  |")
    line = ratios[0]
    for ratio in ratios[1:]:
        if len(f"{line}, {ratio}") > room:
            yield what, conditions, line
            line = ratio
        else:
            line = f"{line}, {ratio}"
    yield what, conditions, line


def _is_layer(entry: Entry) -> bool:
    return entry["name"].endswith("Linears, forward and backward")


def _ratio(entry: Entry, other: str) -> float | None:
    """How much faster than ``other``, if the result was right."""
    return None if entry["correct"] is False else (entry["over"] or {}).get(other)


def _size(entry: Entry) -> str:
    return "×".join(map(str, entry["shape"]))
