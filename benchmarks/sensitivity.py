"""Which layers FP8 moves the gradient most by, in three small models of three seeds: should the default change?

    python -m benchmarks.sensitivity --json out.json

The models train in float32 first, on the source text of Python's standard library, or on images of gratings. Each is
then measured under three recipes; the results are in docs/sensitivity.md.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import machine
from benchmarks.measuring.files import write
from benchmarks.measuring.report import markdown
from lightning_fp8.sensitivity import Sensitivity, measure_sensitivity

SEEDS = (0, 1, 2)
RECIPES = ("delayed", "tensorwise", "blockwise")
STEPS, LENGTH, BATCH, DEPTH, WIDTH = 120, 64, 8, 6, 128
MEASURED_BATCHES = 2

Loss = Callable[[Any, Any], Tensor]


def gpt() -> tuple[nn.Module, Loss, Iterator[Any]]:
    """The example's GPT."""
    from examples.train_gpt import GPT

    model = GPT(width=WIDTH, depth=DEPTH, heads=4)
    return model, lambda model, batch: model.training_step(batch, 0), _bytes()


def llama() -> tuple[nn.Module, Loss, Iterator[Any]]:
    """Hugging Face's Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config), _of_tokens, _bytes()


def vit() -> tuple[nn.Module, Loss, Iterator[Any]]:
    """Hugging Face's vision transformer, which tells eight directions of noisy gratings."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=4, intermediate_size=4 * WIDTH,
        image_size=32, patch_size=4, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), _of_images, _gratings()


MODELS = {"GPT": gpt, "Llama": llama, "ViT": vit}


def _of_tokens(model: Any, batch: Any) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def _of_images(model: Any, batch: Any) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def _bytes() -> Iterator[Any]:
    from examples.train_gpt import StdlibBytes

    data = StdlibBytes(length=LENGTH, batch_size=BATCH)
    data.setup("fit")
    while True:
        yield from data.train_dataloader()


def _gratings() -> Iterator[Any]:
    axis = torch.linspace(-math.pi, math.pi, 32)
    while True:
        labels = torch.randint(8, (4 * BATCH,))
        angle = labels * (math.pi / 8)
        phase = 2 * math.pi * torch.rand(len(labels))
        across = axis[None, :, None] * angle.cos()[:, None, None] + axis[None, None] * angle.sin()[:, None, None]
        images = torch.sin(3 * across + phase[:, None, None])[:, None].expand(-1, 3, -1, -1)
        yield images + torch.randn(images.shape), labels


def measured(
    make: Callable[[], tuple[nn.Module, Loss, Iterator[Any]]], seed: int, steps: int
) -> Iterator[dict[str, Any]]:
    """The results of one trained model under every recipe."""
    torch.manual_seed(seed)
    model, loss, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        value = loss(model, next(data))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    batches = [next(data) for _ in range(MEASURED_BATCHES)]
    for recipe in RECIPES:
        found = measure_sensitivity(model, batches, loss, recipe=recipe, progress=False)
        same = measure_sensitivity(model, batches, loss, recipe=recipe, budget=found.default_error, progress=False)
        assert same.check is not None
        yield {
            "recipe": recipe,
            "loss": statistics.fmean(losses[-10:]),
            "layers": len(found.rows),
            "all_error": found.all_error,
            "default": described(found, found.default_skip, found.default_error),
            "ranked": described(found, same.check.skip, same.check.measured),
            "predicted_without_default": found.predicted(found.default_skip),
            "positions": positions(found),
            "rows": [[row.name, row.error, row.flops] for row in found.rows],
        }


def described(found: Sensitivity, skip: tuple[str, ...], error: float) -> dict[str, Any]:
    """Layers that stay in BF16: how many, what remains in FP8, and the error."""
    return {"skip": list(skip), "layers": len(skip), "flops_in_fp8": found.flops_in_fp8(skip), "error": error}


def positions(found: Sensitivity) -> dict[str, float]:
    """The mean place in the ranking, from 0 to 1, of the layers of the first and of the last block."""
    numbers = [_block(row.name) for row in found.rows]
    last = max(numbers)
    return {
        name: statistics.fmean(place / (len(numbers) - 1) for place, each in enumerate(numbers) if each == block)
        for name, block in (("first", 0), ("last", last))
    }


def _block(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sensitivity", description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the results to this file")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training; default: {STEPS}")
    args = parser.parse_args(arguments)
    document: dict[str, Any] = {
        "what": "sensitivity of layers to FP8; see docs/sensitivity.md",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "torch": torch.__version__,
        "steps": args.steps,
        "results": [],
    }
    for name in args.models.split(","):
        for seed in SEEDS[: args.seeds]:
            for result in measured(MODELS[name], seed, args.steps):
                document["results"].append({"model": name, "seed": seed, **result})
                write(document, args.json)
                print(line(document["results"][-1]), flush=True)


def line(result: dict[str, Any]) -> str:
    """One result."""
    default, ranked = result["default"], result["ranked"]
    return (
        f"{result['model']} seed {result['seed']}, {result['recipe']}: all {result['all_error']:.2%}; default "
        f"{default['error']:.2%} with {default['layers']} of {result['layers']} layers in BF16; by the ranking "
        f"{ranked['error']:.2%} with {ranked['layers']}, {ranked['flops_in_fp8']:.0%} instead of "
        f"{default['flops_in_fp8']:.0%} of the FLOPs in FP8; place of the first block "
        f"{result['positions']['first']:.2f}, of the last {result['positions']['last']:.2f}"
    )


def table(document: dict[str, Any]) -> str:
    """Means over the seeds, in Markdown; in parentheses the least and the greatest."""
    heading = (
        "model, recipe", "all layers in FP8", "the default", "first block alone in BF16", "last block alone",
        "by the ranking", "its FLOPs in FP8", "its layers in BF16",
    )  # fmt: skip
    rows = []
    for key in dict.fromkeys((each["model"], each["recipe"]) for each in document["results"]):
        of_key = [each for each in document["results"] if (each["model"], each["recipe"]) == key]
        kept = [each["ranked"]["layers"] for each in of_key]
        rows.append(
            (
                ", ".join(key),
                _spread([each["all_error"] for each in of_key], 2),
                _spread([each["default"]["error"] for each in of_key], 2),
                _spread([without_block(each, 0) for each in of_key], 2),
                _spread([without_block(each, -1) for each in of_key], 2),
                _spread([each["ranked"]["error"] for each in of_key], 2),
                _spread([each["ranked"]["flops_in_fp8"] for each in of_key], 0),
                f"{min(kept)} – {max(kept)} instead of {of_key[0]['default']['layers']}, of {of_key[0]['layers']}",
            )
        )
    return markdown(heading, rows)


def without_block(result: dict[str, Any], block: int) -> float:
    """The error that the rows let expect with one block in BF16, the first (0) or the last (-1)."""
    numbers = sorted({_block(name) for name, *_ in result["rows"]} - {-1})
    return math.sqrt(sum(error**2 for name, error, _ in result["rows"] if _block(name) != numbers[block]))


def _spread(values: list[float], digits: int) -> str:
    least, most = (f"{100 * each:.{digits}f}" for each in (min(values), max(values)))
    return f"{100 * statistics.fmean(values):.{digits}f} % ({least} – {most})"


if __name__ == "__main__":
    main()
