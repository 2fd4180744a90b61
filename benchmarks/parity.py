"""Whether fused steps train as unfused ones: losses of a small Llama over seeds, with BF16 and with float32 weights.

    python -m benchmarks.parity --json out.json --jobs 2

Llama of 3 blocks, 128 wide, reads bytes of Python's standard library: 200 steps of 8 × 64, AdamW. Runs of one seed
share their initial weights and their batches, so that they differ by their rounding alone. The loss is that of 64
sequences of files that no step has read. All blocks run in FP8.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring.files import write
from lightning_fp8 import FP8FabricPrecision

WHAT = "losses of a small Llama, fused and not; see docs/benchmarks.md"
SEEDS, STEPS, LENGTH, BATCH, HELD_OUT = 3, 200, 64, 8, 64


class Run(NamedTuple):
    """A training: weights of ``dtype``, in high precision (no recipe) or FP8."""

    dtype: str
    recipe: str | None
    fuse: bool
    seed: int

    @property
    def name(self) -> str:
        how = "BF16" if self.recipe is None else f"{self.recipe}, fuse={self.fuse}"
        return f"{self.dtype} weights, {how}"


HOW = (None, False), ("delayed", False), ("delayed", True), ("blockwise", False), ("blockwise", True)
RUNS = [
    Run(dtype, recipe, fuse, seed) for seed in range(SEEDS) for dtype in ("bfloat16", "float32") for recipe, fuse in HOW
]


@cache
def bytes_of_the_library() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes of other files."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = [b"".join(file.read_bytes() for file in files[start::8]) for start in range(8)]
    train, held_out = b"".join(text[1:]), text[0]
    return tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (train, held_out))  # type: ignore[return-value]


def drawn(source: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(source) - LENGTH, (count,), generator=generator)
    return torch.stack([source[start : start + LENGTH] for start in starts.tolist()]).long()


def loss_of(run: Run, steps: int = STEPS) -> float:
    """The loss of held-out bytes after training, in nats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no tables of layers
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    dtype = getattr(torch, run.dtype)
    model = LlamaForCausalLM(config).to(dtype)
    plugin = None
    if run.recipe is not None:
        plugin = FP8FabricPrecision(run.recipe, fuse=run.fuse, first_last_layers_bf16=False)
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3 if dtype is torch.float32 else 1e-3)
    train, held_out = bytes_of_the_library()
    generator = torch.Generator().manual_seed(run.seed)

    def loss(tokens: Tensor) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32)
        with autocast if plugin is None else plugin.forward_context():
            return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    for _ in range(steps):
        loss(drawn(train, BATCH, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return float(loss(drawn(held_out, HELD_OUT, torch.Generator().manual_seed(99))))


def summary(losses: dict[str, list[float]]) -> dict[str, Any]:
    """By run the losses of the seeds; by pair of fused and unfused ones the mean difference, and its spread."""
    differences = {}
    for name, fused in losses.items():
        if name.endswith("fuse=True"):
            pairs = [a - b for a, b in zip(fused, losses[name.replace("fuse=True", "fuse=False")], strict=True)]
            mean, spread = statistics.mean(pairs), statistics.stdev(pairs)
            differences[name] = {"mean": round(mean, 4), "standard deviation": round(spread, 4)}
    rounded = {name: [round(each, 4) for each in of_seeds] for name, of_seeds in losses.items()}
    return {"losses by seed, nats": rounded, "fused less unfused": differences}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description="Fused against unfused losses.")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    with ProcessPoolExecutor(args.jobs) as processes:
        found = processes.map(loss_of, RUNS, [args.steps] * len(RUNS))
        losses: dict[str, list[float]] = {}
        for run, loss in zip(RUNS, found):
            print(f"seed {run.seed}, {run.name}: {loss:.4f}", flush=True)
            losses.setdefault(run.name, []).append(loss)
    made = summary(losses)
    print(json.dumps(made["fused less unfused"], indent=1))
    if args.json:
        write({"what": WHAT, "torch": torch.__version__, "steps": args.steps, "seeds": SEEDS, **made}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
