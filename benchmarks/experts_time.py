"""Estimate from how many rows per expert FP8 pays on an H200: computed, not measured.

    python -m benchmarks.experts_time --json benchmarks/results/DATE-experts-computed.json

The grouped kernels have not run on a GPU. Rates of GEMMs, casts and copies, and the host time of an op, are those of
dense layers in committed results; what no result has is an assumption, and a named constant here. Time is that of
forward and backward of one layer's experts: GEMMs and casts, without router, activation and sorting, which are the same
in BF16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.measuring.files import write
from benchmarks.measuring.record import OURS
from cuda_kernels.host.gemm_measurements import rates_file
from lightning_fp8.functions.grouped import MANY_EXPERTS

WHAT = "computed, not measured: time of experts' GEMMs and casts on an H200; see docs/experts.md"
CARD = "NVIDIA H200"
CASTS_FILE = Path(__file__).parent / "results" / "2026-11-27-h200-casts.json"

GROUPED = 0.95
"""Assumed rate of a grouped GEMM in FP8 over the dense one. BF16's grouped GEMM is given the dense rate."""
ROWS_OF_TILE = 128
"""Half a tile of each group computes rows of no token, in BF16 and FP8."""
GEMMS_OF_EXPERT, OPS_OF_WGRAD = 4, 6
"""Ops that a loop calls for an expert: fprop and dgrad of two matrices; the wgrad of both, with two operands each."""
MICRO_BATCHES = 8
"""For the row of weights whose FP8 copies are kept while gradients accumulate."""

MOST = 32768
"""Rows of an expert, from which the least are searched downwards."""


class Shape(NamedTuple):
    """Gated experts of one layer on one GPU, and ``tokens × top_k`` rows."""

    name: str
    experts: int
    hidden: int
    inner: int
    rows: int


SHAPES = (
    Shape("Mixtral-8x7B, 16,384 tokens", 8, 4096, 14336, 2 * 16384),
    Shape("Qwen3-30B-A3B, 16,384 tokens", 128, 2048, 768, 8 * 16384),
    Shape("Qwen3-30B-A3B, 65,536 tokens", 128, 2048, 768, 8 * 65536),
    Shape("gpt-oss-20b, 16,384 tokens", 32, 2880, 2880, 4 * 16384),
    Shape("DeepSeek-V3, 8 local experts, 4,096 rows each", 8, 7168, 2048, 8 * 4096),
)


class Casts(NamedTuple):
    """Names of casts in the result file: of tokens; of weights, forward and backward; of an operand of wgrad.

    ``wgrad_bytes`` an element are moved by the last one.
    """

    tokens: str
    weights: tuple[str, str]
    wgrad: str
    wgrad_bytes: int


RECIPES = {
    "delayed": Casts("cast + amax", ("cast", "transposed only"), "transpose of codes", 2),
    "tensorwise": Casts("current scaling", ("current scaling", "current scaling"), "transpose of codes", 2),
    "rowwise": Casts("row", ("row", "row + transposed"), "row + transposed", 3),
    "blockwise": Casts("1x128", ("128x128", "128x128 + transposed"), "1x128 + transposed", 3),
}
"""Recipes whose GEMMs are in FP8 on Hopper."""


@dataclass(frozen=True)
class Rates:
    """In FLOP and bytes per second, and seconds of the host for an op."""

    bf16: float
    fp8: Mapping[str, float]
    casts: Mapping[str, float]
    copy: float
    host: float


@cache
def committed_rates() -> Rates:
    """Of the file that ``benchmarks.rates`` writes, and of :data:`CASTS_FILE`."""
    linear = json.loads(rates_file(CARD).read_text())["linear"]
    (entries,) = json.loads(CASTS_FILE.read_text())["suites"].values()
    ours = [each for each in entries if each["by"] == OURS and each["milliseconds"]]
    square = [each for each in ours if each["shape"] == [8192, 8192] and each["dtype"] == "float8_e4m3fn"]
    return Rates(
        bf16=linear["bf16"],
        fp8={recipe: linear[recipe]["flops"] for recipe in RECIPES},
        casts={each["name"]: each["gigabytes_per_second"] * 1e9 for each in square},
        copy=max(each["gigabytes_per_second"] * 1e9 for each in entries if each["name"].startswith("copy of")),
        host=median(each["host_microseconds"] for each in ours) / 1e6,
    )


class Time(NamedTuple):
    """Seconds of the GPU, and of the host that calls ops for each expert; the longer one counts."""

    gpu: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self)


def bf16_time(shape: Shape, rates: Rates) -> Time:
    """``F.grouped_mm``: fprop, dgrad and wgrad of both matrices."""
    return Time(3 * _gemm(shape, rates.bf16, 2, rates))


def fp8_time(shape: Shape, recipe: str, rates: Rates, *, grouped: bool, casts_of_weights: float = 1.0) -> Time:
    """With fprop and dgrad as ``grouped`` kernels, or a loop; wgrad is a loop, or in BF16 with many experts."""
    casts, experts = RECIPES[recipe], shape.experts
    rate = rates.fp8[recipe] * (GROUPED if grouped else 1)
    gpu = 2 * _gemm(shape, rate, 1, rates) + 2 * 3 * _elements(shape) / rates.casts[casts.tokens]
    gpu += casts_of_weights * sum(3 * experts * _weights(shape) / rates.casts[name] for name in casts.weights)
    host = 0 if grouped else GEMMS_OF_EXPERT * experts * rates.host
    if experts > MANY_EXPERTS:
        return Time(gpu + _gemm(shape, rates.bf16, 2, rates), host)
    gpu += _gemm(shape, rates.fp8[recipe], 1, rates)
    gpu += 2 * casts.wgrad_bytes * _elements(shape) / rates.casts[casts.wgrad]
    return Time(gpu, host + OPS_OF_WGRAD * experts * rates.host)


def least_rows(shape: Shape, recipe: str, rates: Rates, **options: Any) -> int | None:
    """The number of rows per expert, in steps of 16, from which on FP8 is not slower; None if it is at :data:`MOST`."""
    least = None
    for rows in range(MOST, 0, -16):
        of_rows = shape._replace(rows=rows * shape.experts)
        if fp8_time(of_rows, recipe, rates, **options).seconds > bf16_time(of_rows, rates).seconds:
            break
        least = rows
    return least


def _weights(shape: Shape) -> int:
    return 3 * shape.hidden * shape.inner


def _elements(shape: Shape) -> int:
    """Of the inputs of both matrices; of the gradients of their outputs there are about as many."""
    return shape.rows * (2 * shape.hidden + 3 * shape.inner) // 2


def _gemm(shape: Shape, flops_per_second: float, bytes_of_operand: int, rates: Rates) -> float:
    """Seconds of one of the three GEMMs of both matrices, at least those of reading its operands."""
    lost = 1 + ROWS_OF_TILE / 2 / (shape.rows / shape.experts)
    moved = bytes_of_operand * (shape.experts * _weights(shape) + _elements(shape)) + 2 * _elements(shape)
    return max(lost * 2 * shape.rows * _weights(shape) / flops_per_second, moved / rates.copy)


# --- The command ------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "loop": {"grouped": False},
    "grouped": {"grouped": True},
    f"grouped, weights cast once in {MICRO_BATCHES} micro-batches": {
        "grouped": True,
        "casts_of_weights": 2 / 3 / MICRO_BATCHES,  # both copies in one pass: 4 bytes a weight instead of 6
    },
}


def rows(rates: Rates) -> Iterator[dict[str, Any]]:
    """For each shape and recipe the times in milliseconds, the ratios to BF16, and the least rows."""
    for shape in SHAPES:
        bf16 = bf16_time(shape, rates).seconds
        for recipe in RECIPES:
            times = {way: fp8_time(shape, recipe, rates, **options) for way, options in WAYS.items()}
            yield {
                **shape._asdict(),
                "rows of an expert": shape.rows // shape.experts,
                "wgrad": "BF16" if shape.experts > MANY_EXPERTS else "FP8, loop",
                "recipe": recipe,
                "BF16, ms": round(1e3 * bf16, 2),
                "ms": {way: round(1e3 * time.seconds, 2) for way, time in times.items()},
                "of the host, ms": {way: round(1e3 * time.host, 2) for way, time in times.items()},
                "over BF16": {way: round(bf16 / time.seconds, 2) for way, time in times.items()},
                "least rows": {way: least_rows(shape, recipe, rates, **WAYS[way]) for way in ("loop", "grouped")},
            }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(arguments)
    rates = committed_rates()
    found = list(rows(rates))
    for row in found:
        over = ", ".join(f"{way} {ratio:.2f}" for way, ratio in row["over BF16"].items())
        print(f"{row['name']}, {row['recipe']}: BF16 {row['BF16, ms']} ms; {over}; from {row['least rows']}")
    if args.json:
        conditions = (
            "computed, not measured: rates of dense layers on an H200, "
            f"grouped GEMMs in FP8 at {GROUPED} of them, those in BF16 at all of them; balanced groups"
        )
        write({"what": WHAT, "conditions": conditions, "rates": _shown(rates), "rows": found}, args.json)
    return 0


def _shown(rates: Rates) -> dict[str, Any]:
    """The rates that the recipes use."""
    used = {name for each in RECIPES.values() for name in (each.tokens, *each.weights, each.wgrad)}
    casts = {name: rate for name, rate in sorted(rates.casts.items()) if name in used}
    return {"bf16": rates.bf16, "fp8": dict(rates.fp8), "casts": casts, "copy": rates.copy, "host": rates.host}


if __name__ == "__main__":
    raise SystemExit(main())
