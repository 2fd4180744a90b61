"""Charts of a GPU's results: training, products, attention. Each picture carries the numbers that it shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders.attention_contenders import CUDNN
from benchmarks.contenders.attention_problems import BACKWARD, FORWARD
from benchmarks.measuring.record import OURS
from benchmarks.measuring.summary import BF16, CAUSAL, COMPILED, CONDITIONS, LIBRARIES

Entry = dict[str, Any]
Values = dict[str, dict[str, float]]
"""Numbers of a chart: by group (a bar's label, a line's), by series or abscissa."""

TOP = {"training": 0.92, "products": 0.97, "attention": 1}
"""How far up the axes of each chart reach; above them is its legend."""
DESCRIPTION = "Description"
"""The PNG's text that has the numbers as JSON."""
LAYERS = "forward and backward"
"""Ends the names of layers among the products."""


def charts(documents: Sequence[dict[str, Any]]) -> dict[str, Values]:
    """The numbers of each chart by its name. All are speedups: over BF16 in the same run, attention's over cuDNN's."""
    suites: dict[str, list[Entry]] = {}
    for document in documents:
        for suite, entries in document["suites"].items():
            suites.setdefault(suite, []).extend(entry for entry in entries if entry["correct"] is not False)
    layers = [entry for entry in suites["products"] if entry["name"].endswith(LAYERS)]
    return {
        "training": _training(suites["models"]) | _layers(layers),
        "products": _products([entry for entry in suites["products"] if entry not in layers]),
        "attention": _attention(suites["attention"]),
    }


def draw(documents: Sequence[dict[str, Any]], folder: Path, prefix: str) -> list[Path]:
    """Draw :func:`charts` into ``folder``; return the files."""
    drawn = {"training": _draw_training, "products": _draw_products, "attention": _draw_attention}
    paths = []
    for name, values in charts(documents).items():
        paths.append(folder / f"{prefix}_{name}.png")
        figure = drawn[name](values)
        figure.tight_layout(rect=(0, 0, 1, TOP[name]))
        figure.savefig(paths[-1], dpi=110, metadata={DESCRIPTION: json.dumps(values)})
    return paths


def numbers_in(path: Path) -> Values:
    """The numbers that :func:`draw` stored in a picture."""
    from PIL import Image

    with Image.open(path) as picture:
        return json.loads(picture.info[DESCRIPTION])


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _training(entries: list[Entry]) -> Values:
    """Of steps: by recipe, over BF16 that runs in the same way."""
    values: Values = {}
    for entry in entries:
        way = COMPILED if entry["by"].endswith(COMPILED) else ""
        if entry["by"].startswith(OURS) and (ratio := (entry["over"] or {}).get(BF16 + way)):
            recipe = entry["by"].removeprefix(f"{OURS}, ").removesuffix(COMPILED)
            what, *_ = CONDITIONS.get(entry["name"], (entry["name"],))
            values.setdefault(f"{what}{way}", {})[recipe] = ratio
    return values


def _layers(entries: list[Entry]) -> Values:
    values: Values = {}
    for entry in entries:
        if entry["by"].startswith(OURS):
            recipe = entry["by"].removeprefix(OURS).removeprefix(", ") or "delayed"
            name, shape = entry["name"].removesuffix(f", {LAYERS}"), "×".join(map(str, entry["shape"]))
            values.setdefault(f"{name}, {shape}", {})[recipe] = entry["over"][BF16]
    return values


def _products(entries: list[Entry]) -> Values:
    """Of each product: our tile by estimate, our best, each library's best. Gradients need the full accumulator."""
    values: Values = {}
    for entry in entries:
        ratio = (entry["over"] or {}).get(BF16)
        if ratio is None:
            continue
        of = values.setdefault(f"{entry['name']}\n{'×'.join(map(str, entry['shape']))}", {})
        if entry["by"] == OURS:
            of[OURS] = ratio
        if entry["by"].startswith(OURS):
            of[f"{OURS}, best tile"] = max(ratio, of.get(f"{OURS}, best tile", 0))
        of_gradients = any(each in entry["name"] for each in ("dgrad", "wgrad"))
        for library in LIBRARIES:
            if entry["by"].startswith(f"{library} (full" if of_gradients else library):
                of[library] = max(ratio, of.get(library, 0))
    return values


def _attention(entries: list[Entry]) -> Values:
    """Of each pass and width of heads: by length."""
    values: Values = {}
    for entry in entries:
        ratio = (entry["over"] or {}).get(CUDNN)
        each, _, mask = entry["name"].partition(CAUSAL)
        if entry["by"] == OURS and each in (FORWARD, BACKWARD) and not mask and ratio:
            _, length, _, channels = entry["shape"]
            values.setdefault(f"{entry['name']}, {channels} channels", {})[str(length)] = ratio
    return values


# --- Pictures ---------------------------------------------------------------------------------------------------------

GRAY = "0.35"


def _draw_training(values: Values) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.6))
    axes: Any = figure.subplots()
    place, ticks, labels = 0.0, [], []
    for group, (name, ratios) in enumerate(values.items()):
        for recipe, ratio in ratios.items():
            axes.barh(place, ratio, color=f"C{group}", label=name if recipe == next(iter(ratios)) else None)
            axes.text(ratio + 0.01, place, f"{ratio:.2f}", va="center", fontsize=9)
            ticks.append(place)
            labels.append(recipe)
            place += 1
        place += 0.6
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    return _over_bf16(figure, axes, 2, ", which runs in the same way", columns=2)


def _draw_products(values: Values) -> Any:
    from matplotlib.figure import Figure

    series = (OURS, f"{OURS}, best tile", *LIBRARIES)
    figure = Figure(figsize=(7, 0.42 * len(values) + 1.2))
    axes: Any = figure.subplots()
    for at, by in enumerate(series):
        places = [group + 0.2 * (at - 1.5) for group in range(len(values))]
        axes.barh(places, [each.get(by, 0) for each in values.values()], 0.2, label=by, color=f"C{at}")
    axes.set_yticks(range(len(values)), values, fontsize=7)
    axes.set_ylim(len(values) - 0.5, -0.5)
    return _over_bf16(figure, axes, 2.6, columns=4)


def _over_bf16(figure: Any, axes: Any, limit: float, condition: str = "", *, columns: int) -> Any:
    """Finish a picture of horizontal bars from 0 to ``limit``, times as fast as BF16."""
    _mark_one(axes.axvline)
    axes.set_xlim(0, limit)
    axes.set_xlabel(f"times as fast as BF16{condition}")
    figure.legend(loc="upper center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _draw_attention(values: Values) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8))
    pair: Any = figure.subplots(1, 2, sharey=True)
    for axes, each in zip(pair, (FORWARD, BACKWARD)):
        for label, ratios in values.items():
            name, _, channels = label.rpartition(", ")
            if name.removesuffix(CAUSAL) == each:
                style = "--" if name.endswith(CAUSAL) else "-"
                color = {"64 channels": "C1", "128 channels": "C0", "256 channels": "C2"}.get(channels, "C3")
                mask = ", causal" if name.endswith(CAUSAL) else ""
                lengths = [int(length) for length in ratios]
                order = sorted(range(len(lengths)), key=lengths.__getitem__)
                points = [list(ratios.values())[index] for index in order]
                axes.plot(sorted(lengths), points, f"o{style}", color=color, label=f"{channels}{mask}", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            lengths := [2048, 4096, 8192, 16_384, 32_768], [f"{length:,}" for length in lengths], fontsize=7
        )
        _mark_one(axes.axhline)
        axes.set_title(each, fontsize=10)
        axes.set_xlabel("length")
    figure.axes[0].set_ylabel("times as fast as cuDNN in BF16")
    figure.axes[0].legend(fontsize=7)
    return figure


def _mark_one(line: Any) -> None:
    line(1, color=GRAY, linewidth=0.9, linestyle=":")
