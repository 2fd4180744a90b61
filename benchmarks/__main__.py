"""Time a training step of the GPT example in BF16 and with every FP8 recipe, side by side in one run.

    python -m benchmarks --json benchmarks/results/cpu.json

Steps of all precisions alternate, so that a slower moment of the machine meets them all; medians and quartiles are
reported, and each recipe's ratio to BF16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch

from examples.train_gpt import GPT, StdlibBytes
from lightning_fp8 import FP8FabricPrecision, __version__

RECIPES = ["bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]


def training_step(recipe: str, width: int, depth: int, batch: torch.Tensor) -> Callable[[], None]:
    """A function that runs forward, backward, scale update and optimizer of one step."""
    torch.manual_seed(0)
    model = GPT(width=width, depth=depth)
    plugin = None if recipe == "bf16" else FP8FabricPrecision(recipe=recipe)  # type: ignore[arg-type]
    if plugin is None:
        model.bfloat16()
    else:
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        if plugin is None:
            loss = model.loss(batch)
        else:
            with plugin.forward_context():
                loss = model.loss(batch)
        loss.backward()
        if plugin is not None:
            plugin.update_scales()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each step, interleaved; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repetition >= 2:
                seconds[name].append(time.perf_counter() - start)
        print(f"\rround {repetition + 1} of {repetitions + 2}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Median and quartiles in milliseconds, and the median's ratio to BF16's."""
    baseline = statistics.median(seconds["bf16"])
    result = {}
    for name, values in seconds.items():
        low, median, high = statistics.quantiles(values, n=4)
        result[name] = {
            "median_ms": round(1e3 * median, 2),
            "quartiles_ms": [round(1e3 * low, 2), round(1e3 * high, 2)],
            "ratio_to_bf16": round(median / baseline, 3),
        }
    return result


def machine() -> dict[str, Any]:
    model = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": model[0] if model else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_fp8": __version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time FP8 training steps against BF16.")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    data = StdlibBytes(batch_size=args.batch_size)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    steps = {recipe: training_step(recipe, args.width, args.depth, batch) for recipe in RECIPES}
    results = {
        "what": "training step of examples/train_gpt.py: forward, backward, scale update, clipping, AdamW",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "model": {"width": args.width, "depth": args.depth, "batch": list(batch.shape)},
        "repetitions": args.repetitions,
        "results": summarize(measure(steps, args.repetitions)),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
