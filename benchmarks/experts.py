"""Whether experts train in FP8 as in BF16: losses of a small Mixtral over seeds, in each recipe.

    python -m benchmarks.experts --json out.json --jobs 2

Mixtral of 2 blocks, 64 wide, with 8 experts of which each token takes 2, reads bytes of Python's standard library: 200
steps of 8 × 64, AdamW, whose learning rate rises in the first 20 steps and then falls to zero. Runs of one seed share
their initial weights and their batches, so that they differ by their rounding alone. Weights are float32. The loss is
that of 256 sequences of files that no step has read. All blocks run in FP8.

A run in float32 tells how much a rounding that nobody doubts changes the loss: tokens that go to another expert make
any two runs part. Four settings were tried on one seed, some with FP8, and this one was chosen for that distance: at
higher rates over more steps, float32 and BF16 are further apart than any recipe may be, and nothing can be told.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.files import write
from benchmarks.parity import BATCH, LENGTH, bytes_of_the_library, drawn
from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.numerics.recipes import RECIPES

WHAT = "losses of a small mixture of experts, in FP8 and not; see docs/benchmarks.md"
SEEDS, STEPS, WARMUP, HELD_OUT = 3, 200, 20, 256
BF16, FLOAT32 = "BF16", "float32"


class Run(NamedTuple):
    """A training in a recipe, in :data:`BF16` or in :data:`FLOAT32`."""

    how: str
    seed: int


HOW = (BF16, FLOAT32, *RECIPES)


def loss_of(run: Run, steps: int = STEPS) -> float:
    """The loss of held-out bytes after training, in nats."""
    from transformers import MixtralConfig, MixtralForCausalLM

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no tables of layers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    plugin = None
    if run.how in RECIPES:
        plugin = FP8FabricPrecision(run.how, first_last_layers_bf16=False)  # type: ignore[arg-type]
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 7e-4)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (steps - step) / max(steps - WARMUP, 1))
    )
    train, held_out = bytes_of_the_library()
    generator = torch.Generator().manual_seed(run.seed)

    def loss(tokens: Tensor) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=run.how != FLOAT32)
        with autocast, nullcontext() if plugin is None else plugin.forward_context():
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]

    for _ in range(steps):
        loss(drawn(train, BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return float(loss(drawn(held_out, HELD_OUT, torch.Generator().manual_seed(99))))


def summary(losses: dict[str, list[float]]) -> dict[str, Any]:
    """The losses of the seeds, their mean over BF16's, in percent, and the spread of BF16's seeds."""
    base = statistics.mean(losses[BF16])
    return {
        "losses by seed, nats": {how: [round(each, 4) for each in of_seeds] for how, of_seeds in losses.items()},
        "mean over BF16's, percent": {
            how: round(100 * (statistics.mean(of_seeds) / base - 1), 3)
            for how, of_seeds in losses.items()
            if how != BF16
        },
        "BF16's standard deviation over seeds, percent": round(100 * statistics.stdev(losses[BF16]) / base, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description="Losses of experts in FP8.")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    runs = [Run(how, seed) for seed in range(SEEDS) for how in HOW]
    with ProcessPoolExecutor(args.jobs) as processes:
        losses: dict[str, list[float]] = {}
        for run, loss in zip(runs, processes.map(loss_of, runs, [args.steps] * len(runs))):
            print(f"seed {run.seed}, {run.how}: {loss:.4f}", flush=True)
            losses.setdefault(run.how, []).append(loss)
    made = summary(losses)
    print(json.dumps(made, indent=1))
    if args.json:
        write({"what": WHAT, "torch": torch.__version__, "steps": args.steps, "seeds": SEEDS, **made}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
