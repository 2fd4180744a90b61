"""Fit the times by which FP8 and BF16 are compared for a size, from result files of one GPU, and ship them.

    python -m benchmarks.rates ATTENTION.json PRODUCTS.json CASTS.json

A linear layer is fitted to the Linears of a Llama-8B layer, forward and backward, and to the cast with its transpose.
Attention is fitted to forward and backward at lengths of 2,048 to 32,768, by relative errors.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring.files import write_text
from benchmarks.suites.layers import LLAMA_8B
from cuda_kernels.host.gemm_measurements import rates_file

LAYER, TOKENS = "Llama-8B layer's Linears, forward and backward", 8192
CASTS = {
    "delayed": "cast + transposed + amax",
    "tensorwise": "current scaling + transposed",
    "rowwise": "row + transposed",
    "blockwise": "1x128 + transposed",
}
"""By recipe, the cast of an activation or a gradient."""
SIDES = {"cuDNN (BF16)": "cudnn", "flash (BF16)": "flash", "lightning_fp8": "fp8"}


def rates(attention: dict[str, Any], products: dict[str, Any], casts: dict[str, Any]) -> dict[str, Any]:
    """The contents of the file that ships: rates in FLOP and bytes per second, times of attention in nanoseconds."""
    (card,) = {document["machine"]["card"]["name"] for document in (attention, products, casts)}
    return {
        "card": card,
        "dates": [document["date"][:10] for document in (attention, products, casts)],
        "linear": _linear(_timed(products), _timed(casts)),
        "attention": _attention(_timed(attention)),
    }


def _timed(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for suite in document["suites"].values() for each in suite if each["milliseconds"]]


def _linear(products: list[dict[str, Any]], casts: list[dict[str, Any]]) -> dict[str, Any]:
    times = {each["by"]: each["milliseconds"]["median"] / 1e3 for each in products if each["name"] == LAYER}
    flops = sum(6 * TOKENS * n * k for n, k in LLAMA_8B.values())
    cast_bytes = sum(4 * (TOKENS * n + TOKENS * k + n * k) for n, k in LLAMA_8B.values())
    found: dict[str, Any] = {"bf16": _rounded(flops / times["BF16"])}
    for recipe, name in CASTS.items():
        measured = next(
            each
            for each in casts
            if each["name"] == name and each["shape"] == [8192, 8192] and each["by"] == "lightning_fp8"
        )
        bandwidth = measured["gigabytes_per_second"] * 1e9
        time = times["lightning_fp8" if recipe == "delayed" else f"lightning_fp8, {recipe}"]
        found[recipe] = {"flops": _rounded(flops / (time - cast_bytes / bandwidth)), "bytes": _rounded(bandwidth)}
    return found


def _attention(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times: dict[tuple[int, bool, bool], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for each in results:
        direction, *options = each["name"].split(", ")
        if direction in ("forward", "backward") and each["by"] in SIDES:
            batch, length, heads, channels = each["shape"]
            key = channels, "causal" in options, "4 heads to one of keys" in options
            of_query = each["milliseconds"]["median"] * 1e6 / (batch * length * heads)
            times[key][SIDES[each["by"]]][length].append(of_query)
    return [
        {"channels": channels, "causal": causal, "shared": shared} | {side: _line(each) for side, each in of.items()}
        for (channels, causal, shared), of in sorted(times.items())
    ]


def _line(times_of: dict[int, list[float]]) -> list[float]:
    """The fixed time and the time of each tile of 128 keys, with the least relative errors, of both passes."""
    tiles, times = np.array([(length / 128, sum(passes)) for length, passes in times_of.items()]).T
    fixed, each = np.linalg.lstsq(np.stack([1 / times, tiles / times], 1), np.ones_like(times))[0]
    return [_rounded(fixed), _rounded(each)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """:func:`rates` of the files of attention, products and casts."""
    return rates(*(json.loads(path.read_text()) for path in paths))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("attention", "products", "casts"):
        parser.add_argument(name, type=Path, help=f"the result file of {name}")
    found = read(vars(parser.parse_args()).values())
    write_text(json.dumps(found).replace("}, ", "},\n ") + "\n", rates_file(found["card"]))  # a line for each fit
    print(rates_file(found["card"]))
