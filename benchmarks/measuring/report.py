"""Formatted results: Markdown tables, the plot."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.record import OURS

BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"

Entry = dict[str, Any]


def table(document: dict[str, Any]) -> str:
    """The tables of all suites of a run."""
    tables = {
        "casts": _casts,
        "products": _products,
        "experts": _products,
        "attention": _attention,
        "hardware": _hardware,
        "models": _models,
        "sizes": _sizes,
        "host": _host,
        "training": _training,
        "emulation": _emulation,
        "monitor": _monitor,
    }
    parts = [provenance(document)]
    parts += [tables[name](entries) for name, entries in document["suites"].items() if entries]
    parts += [f"**{name} broke off**: {error.splitlines()[-1]}" for name, error in document["errors"].items()]
    return "\n\n".join(parts)


def insert(text: str, content: str) -> str:
    """Replace the text between the two markers by ``content``.

    Raises:
        ValueError: the markers do not occur once each, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end) or any(marker in part for marker in (BEGIN, END) for part in (before, inside, after)):
        raise ValueError(f"the text must contain {BEGIN} and, after it, {END}, once each")
    return f"{before}{begin}\n{content}\n{end}{after}"


def provenance(document: dict[str, Any]) -> str:
    machine = document["machine"]
    card, versions = machine["card"], machine["versions"]
    where = f"{card['name']}, driver {card.get('driver_version', '?')}" if card else machine["processor"]
    commit, dash, changed = (document["commit"] or "").partition("-")
    commit = f"commit {commit[:10]}{dash}{changed}" if commit else f"sources {machine['sources']}"
    dry = "Dry run, the numbers mean nothing: " if document["arguments"]["dry_run"] else ""
    return f"{dry}{where}, torch {versions['torch']}, numba-cuda {versions['numba-cuda']}, {commit}, {document['date']}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _quartiles(entry: Entry, digits: int = 4) -> str:
    times = entry["milliseconds"]
    if times is None:
        return ""
    return f"{times['median']:.{digits}f} ({times['low']:.{digits}f} – {times['high']:.{digits}f})"


# --- Casts ------------------------------------------------------------------------------------------------------------


def _casts(entries: list[Entry]) -> str:
    """A row per work and contender: numbers on the first shape, fractions of the copy on the others."""
    main = _main_shape(entries)
    others = [shape for shape in _shapes(entries) if len(shape) == 2 and shape != main]
    rows = []
    for first, rest in _grouped(entries):
        elsewhere = [entry for entry in rest if entry["dtype"] == first["dtype"]]
        e5m2 = [entry for entry in rest if entry["shape"] == first["shape"] and entry["dtype"] == "float8_e5m2"]
        wrong = any(entry["correct"] is False for entry in (first, *rest))
        rows.append(
            (
                first["name"] + ("" if first["shape"] == main else f" {first['shape']}") + (", **wrong**" * wrong),
                first["by"],
                _quartiles(first) or first["note"] or "",
                _number(first["gigabytes_per_second"], 0),
                _number(first["fraction_of_copy"], 2),
                " ".join(_number(entry["fraction_of_copy"], 2) for entry in elsewhere),
                " ".join(_number(entry["fraction_of_copy"], 2) for entry in e5m2),
                _number(first["host_microseconds"], 1),
                _verdicts(first),
            )
        )
    header = ("work", "by", "ms (quartiles)", "GB/s", "of copy", "other shapes", "E5M2", "host µs", "targets")
    about = f"bfloat16 {main} to E4M3 unless stated otherwise; other shapes: {', '.join(map(str, others))}"
    return f"{about}\n\n{markdown(header, rows)}"


def _main_shape(entries: list[Entry]) -> list[int]:
    return next(entry["shape"] for entry in entries if entry["by"] == OURS)


def _shapes(entries: list[Entry]) -> list[list[int]]:
    """Shapes of the casts, in the order of the run."""
    casts = (tuple(entry["shape"]) for entry in entries if entry["dtype"].startswith("float8"))
    return [list(shape) for shape in dict.fromkeys(casts)]


def _grouped(entries: list[Entry]) -> Iterable[tuple[Entry, list[Entry]]]:
    """For each work and contender, the first entry and the others (other shapes, other formats); peers are adjacent."""
    groups: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        groups.setdefault(entry["name"], {}).setdefault(entry["by"], []).append(entry)
    return ((group[0], group[1:]) for by in groups.values() for group in by.values())


def _verdicts(entry: Entry) -> str:
    """``✓ of copy ≥ 0.9; ✗ host µs ≤ 8``."""
    words = {"fraction_of_copy": "of copy ≥", "host_microseconds": "host µs ≤", "milliseconds": "ms ≤"}
    words |= {"teraflops": "TFLOP/s ≥", **{key: f"{key} ≥" for key in entry["target"] or {} if key.startswith("over ")}}
    marks = {True: "✓", False: "✗", None: "?"}
    return "; ".join(
        f"{marks[entry['met'][key]]} {words[key]} {limit:g}" for key, limit in (entry["target"] or {}).items()
    )


def plot(documents: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the fraction of copy bandwidth of each work on the first shape in E4M3, with a panel per run.

    Error bars are the quartiles, black ticks the targets.
    """
    from matplotlib.figure import Figure

    panels = [_drawn(each["suites"]["casts"]) for each in documents]
    figure = Figure(figsize=(8.5 * len(panels), 1.5 + 0.28 * max(map(len, panels))))
    colors: dict[str, str] = {}
    for axes, document, entries in zip(figure.subplots(1, len(panels), squeeze=False)[0], documents, panels):
        for place, entry in enumerate(entries):
            fraction, times = entry["fraction_of_copy"], entry["milliseconds"]
            low, high = fraction * times["median"] / times["high"], fraction * times["median"] / times["low"]
            color = colors.setdefault(entry["by"], f"C{len(colors)}")
            axes.barh(place, fraction, color=color, xerr=[[fraction - low], [high - fraction]], capsize=2)
            if entry["target"] and "fraction_of_copy" in entry["target"]:
                axes.plot([entry["target"]["fraction_of_copy"]] * 2, [place - 0.45, place + 0.45], color="black")
        axes.set_yticks(range(len(entries)), [f"{entry['name']}, {entry['by']}" for entry in entries])
        axes.set_ylim(len(entries) - 0.4, -0.6)
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set_xlabel(f"{entries[0]['shape']}: fraction of the bandwidth of a copy")
        axes.set_title(textwrap.fill(provenance(document), 70, break_on_hyphens=False), fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _drawn(entries: list[Entry]) -> list[Entry]:
    shape = _main_shape(entries)
    firsts = (first for first, _ in _grouped(entries))
    return [entry for entry in firsts if entry["shape"] == shape and entry["fraction_of_copy"] is not None]


# --- Products ---------------------------------------------------------------------------------------------------------


def _products(entries: list[Entry]) -> str:
    """Of our tiles, the chosen one and the fastest."""
    fastest: dict[tuple[Any, ...], float] = {}
    for entry in entries:
        if entry["choice"] and entry["by"].startswith(OURS) and entry["milliseconds"]:
            work, time = _work(entry), entry["milliseconds"]["median"]
            fastest[work] = min(time, fastest.get(work, time))
    entries = [
        entry
        for entry in entries
        if not (entry["choice"] and entry["by"].startswith(f"{OURS},") and entry["correct"] and entry["milliseconds"])
        or entry["milliseconds"]["median"] == fastest[_work(entry)]
    ]
    rows = (
        (
            f"{entry['name']} {'×'.join(map(str, entry['shape']))}" + ", **wrong**" * (entry["correct"] is False),
            entry["by"],
            _quartiles(entry) or entry["note"] or "",
            _number(entry["teraflops"], 0),
            "; ".join(f"{by} {ratio:.2f}" for by, ratio in (entry["over"] or {}).items()),
            _verdicts(entry),
        )
        for entry in entries
    )
    return markdown(("product m×n×k", "by", "ms (quartiles)", "TFLOP/s", "times as fast as", "targets"), rows)


def _work(entry: Entry) -> tuple[Any, ...]:
    return entry["name"], *entry["shape"]


# --- Attention --------------------------------------------------------------------------------------------------------


def _attention(entries: list[Entry]) -> str:
    rows = (
        (
            f"{entry['name']} {'×'.join(map(str, entry['shape']))}" + ", **wrong**" * (entry["correct"] is False),
            entry["by"],
            _quartiles(entry, 3) or entry["note"] or "",
            _number(entry["teraflops"], 0),
            "; ".join(f"{by} {ratio:.2f}" for by, ratio in (entry["over"] or {}).items()),
            " ".join(f"{name} {100 * error:.2f}" for name, error in (entry["errors"] or {}).items()),
            _verdicts(entry),
        )
        for entry in entries
        if not _is_absent(entry)
    )
    absent = "; ".join(dict.fromkeys(f"{entry['by']} is {entry['note']}" for entry in entries if _is_absent(entry)))
    header = ("pass B×L×H×D", "by", "ms (quartiles)", "TFLOP/s", "times as fast as", "error, %", "targets")
    return markdown(header, rows) + (f"\n\n{absent}" if absent else "")


def _is_absent(entry: Entry) -> bool:
    """Whether the contender is not installed."""
    return (entry["note"] or "").startswith("absent")


# --- Hardware ---------------------------------------------------------------------------------------------------------


def _hardware(entries: list[Entry]) -> str:
    rows = (
        (
            f"{entry['name']} {'×'.join(map(str, entry['shape']))}",
            entry["by"],
            _quartiles(entry, 3) or entry["note"] or "",
            _number(entry["teraflops"], 0),
            _number(entry["gigabytes_per_second"], 0),
            "; ".join(f"{by} {ratio:.2f}" for by, ratio in (entry["over"] or {}).items()),
            " ".join(f"{name} {100 * error:.3f}" for name, error in (entry["errors"] or {}).items()),
        )
        for entry in entries
    )
    return markdown(("what", "how", "ms (quartiles)", "TFLOP/s", "GB/s", "times as fast as", "error, %"), rows)


# --- Host and training ------------------------------------------------------------------------------------------------


def _host(entries: list[Entry]) -> str:
    parts = next(list(entry["parts"]) for entry in entries if entry["parts"])
    rows = (
        (
            entry["name"] if entry["by"] == OURS else f"{entry['by']}: {entry['name']}",
            _number(entry["host_microseconds"], 1) or entry["note"] or "",
            *(_number(entry["parts"][part], 1) if entry["parts"] else "" for part in parts),
            _verdicts(entry),
        )
        for entry in entries
    )
    return markdown(("host time of a call", "µs", *parts, "target"), rows)


def _training(entries: list[Entry]) -> str:
    baseline = entries[0]["milliseconds"]["median"]
    rows = (
        (entry["name"], _quartiles(entry, 1), _number(entry["milliseconds"]["median"] / baseline, 2))
        for entry in entries
    )
    return markdown(("on the CPU", "ms (quartiles)", f"against {entries[0]['name']}"), rows)


def _models(entries: list[Entry]) -> str:
    details = ("tokens per second", "host ms", "peak GiB") if any("details" in entry for entry in entries) else ()
    rows = (
        (
            f"{entry['name']}, {'×'.join(map(str, entry['shape'])) + ', ' if details else ''}{entry['by']}",
            _quartiles(entry, 2),
            *(f"{ratio:.2f}" for ratio in (entry["over"] or {"": 1.0}).values()),
            *(str(entry.get("details", {}).get(name, "")) for name in details),
            entry["note"] or {True: "as BF16's", False: "**differs**", None: ""}[entry["correct"]],
        )
        for entry in entries
    )
    return markdown(("on the GPU", "ms (quartiles)", "times as fast as BF16", *details, "first loss"), rows)


def _sizes(entries: list[Entry]) -> str:
    rows = (
        (
            f"{entry['name']} {'×'.join(map(str, entry['shape']))}" + ", **wrong**" * (entry["correct"] is False),
            entry["by"],
            _quartiles(entry, 3) or entry["note"] or "",
            "; ".join(f"{by} {ratio:.2f}" for by, ratio in (entry["over"] or {}).items()),
        )
        for entry in entries
        if not _is_absent(entry)
    )
    return markdown(("work", "by", "ms (quartiles)", "times as fast as"), rows)


# --- Emulation --------------------------------------------------------------------------------------------------------


def _emulation(entries: list[Entry]) -> str:
    rows = (
        (
            entry["name"],
            entry["by"],
            _quartiles(entry, 1),
            "; ".join(f"{1 / ratio:.2f} {by}" for by, ratio in (entry["over"] or {}).items()),
            "; ".join(
                f"{'✓' if entry['met'][key] else '✗'} ≤ {1 / limit:.2f}"
                for key, limit in (entry["target"] or {}).items()
            ),
        )
        for entry in entries
    )
    return markdown(("on one thread", "by", "ms (quartiles)", "costs as much as", "targets"), rows)


def _monitor(entries: list[Entry]) -> str:
    rows = (
        (
            entry["name"],
            entry["by"],
            _quartiles(entry, 1) if entry["milliseconds"] else entry["note"],
            "; ".join(f"{1 / ratio:.4f}" for ratio in (entry["over"] or {}).values()),
            "; ".join(
                f"{'✓' if entry['met'][key] else '✗'} ≤ {1 / limit:.2f}"
                for key, limit in (entry["target"] or {}).items()
            ),
        )
        for entry in entries
    )
    return markdown(("on one thread", "by", "ms (quartiles)", "of a step without a monitor", "target"), rows)
