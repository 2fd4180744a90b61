"""Train a small Llama of transformers on sequences of 2,048 bytes in BF16 and in FP8 with FP8 attention.

    python examples/long_context.py --out docs/long_context

Once as it is, and once with an attention sink: a first token of its own whose key takes most of every row's mass, as
large models learn it (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453). Here
the initial weights have it, and training may change it; the mass of the first key is measured before and after. All
blocks run in FP8, the first and the last too. Finished runs are kept in OUT.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from bf16_on_cpu import made_on  # the files beside this one
from compare_recipes import fitted
from torch import Tensor
from torchmetrics.aggregation import MeanMetric
from train_gpt import BYTES, StdlibBytes, warmup_and_cosine
from transformers import LlamaConfig, LlamaForCausalLM

DATA = ("plain", "sink")
FIRST = BYTES
"""The token that sequences with a sink start with."""
CONSTANT, MARK = 0, 1
"""Channels of the residual stream: one in which all other tokens are equal, and the first token's own."""
LAST = 50
"""Steps at the end whose mean training loss is reported."""


class Llama(L.LightningModule):
    """Two blocks with two heads of 64 channels, which share a key head."""

    def __init__(self, sink: bool, lr: float = 1e-3) -> None:
        super().__init__()
        self.sink, self.lr = sink, lr
        config = LlamaConfig(
            vocab_size=BYTES + 1,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=2048,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config)
        if sink:
            plant_sink(self.model)
        self.val_loss = MeanMetric()

    def tokens(self, batch: Tensor) -> Tensor:
        """``[batch, time]`` inputs of ``[batch, time + 1]`` bytes."""
        tokens = batch[:, :-1].clone()
        if self.sink:
            tokens[:, 0] = FIRST
        return tokens

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.model(input_ids=self.tokens(batch)).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_validation_epoch_start(self) -> None:
        self.val_loss.set_dtype(torch.float32).reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_loss.update(self.loss(batch).float(), len(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.val_loss.compute())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = warmup_and_cosine(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def plant_sink(model: LlamaForCausalLM) -> None:
    """Give the first token a large key, which all queries point at, and a value near 0.

    Its key is in the channel that the rotary embedding turns least: by 0.3 rad over 2,048 bytes. The scaled score is
    near 10 where those of other keys are near 0.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, CONSTANT], embedding[:, MARK] = 0.1, 0.0
    embedding[FIRST] = 0.0
    embedding[FIRST, MARK] = 0.2
    slowest = model.config.head_dim // 2 - 1
    for layer in model.model.layers:
        attention = layer.self_attn
        for weight, channel, size in ((attention.q_proj.weight, CONSTANT, 2.0), (attention.k_proj.weight, MARK, 0.75)):
            weight[slowest :: model.config.head_dim] = 0.0
            weight[slowest :: model.config.head_dim, channel] = size
        attention.v_proj.weight[:, MARK] = 0.0


@torch.no_grad()
def mass_of_first_key(module: Llama, batch: Tensor) -> list[float]:
    """The share of attention that the first key gets in each layer: the mean over heads and queries after the first."""
    config = LlamaConfig(**{**module.model.config.to_dict(), "attn_implementation": "eager"})
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(module.model.state_dict())
    weights = model(input_ids=module.tokens(batch), output_attentions=True).attentions
    return [round(layer[:, :, 1:, 0].mean().item(), 4) for layer in weights]


def train(data: str, recipe: str, seed: int, steps: int, length: int) -> dict[str, Any]:
    """One run: its losses in nats per byte, how much of it ran in FP8, and the mass of the first key."""
    L.seed_everything(seed)
    module = Llama(sink=data == "sink")
    batches = StdlibBytes(length=length, batch_size=1, train_sequences=steps, val_sequences=16, seed=seed)
    batches.setup("fit")
    probe = next(iter(batches.val_dataloader()))
    before = mass_of_first_key(module, probe)
    run = fitted(module.train(), batches, recipe, steps, attention=True, all_blocks=True)
    return {**run, "first_key": {"before": before, "after": mass_of_first_key(module, probe)}}


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Markdown: each finished run beside the BF16 run of its data and seed."""
    rows = [
        "| data | seed | run | validation loss | against BF16 | training loss, last 50 steps | against BF16 "
        "| FP8 layers | FP8 attentions | mass of the first key, before and after |",
        "|---" * 10 + "|",
    ]
    for name, run in runs.items():
        data, recipe, seed = name.split("/")
        baseline = runs[f"{data}/bf16/{seed}"]
        last, last_of_baseline = (statistics.mean(each["losses"][-LAST:]) for each in (run, baseline))
        mass = ["/".join(f"{layer:.1%}" for layer in run["first_key"][when]) for when in ("before", "after")]
        rows.append(
            f"| {data} | {seed} | {recipe} | {run['val_loss']:.4f} | {run['val_loss'] / baseline['val_loss'] - 1:+.2%} "
            f"| {last:.4f} | {last / last_of_baseline - 1:+.2%} | {run['fp8_layers']} | {run['fp8_attentions']} "
            f"| {', '.join(mass)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama on 2,048 bytes of context, with FP8 attention.")
    parser.add_argument("--recipes", default="tensorwise", help="separated by commas; BF16 always runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=2048, help="bytes of context, at most 2048")
    parser.add_argument("--out", type=Path, default=Path("long_context"), help="path of the .md and .json")
    args = parser.parse_args()

    record, settings = args.out.with_suffix(".json"), {"steps": args.steps, "length": args.length}
    saved = json.loads(record.read_text()) if record.exists() else {"settings": settings, "runs": {}}
    if saved["settings"] != settings:
        raise SystemExit(f"{record} holds runs with {saved['settings']}, not {settings}; choose another --out")
    runs = saved["runs"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python {shlex.join(['examples/long_context.py', *sys.argv[1:]])}"
    recipes = ["bf16", *args.recipes.split(",")]
    for seed in range(args.seeds):
        for data in DATA:
            for recipe in recipes:
                name = f"{data}/{recipe}/{seed}"
                if name not in runs:
                    runs[name] = train(data, recipe, seed, args.steps, args.length)
                    record.write_text(json.dumps(saved))
    text = f"# FP8 attention with a long context\n\nMade on {made_on()}; by\n\n```\n{command}\n```\n\n{table(runs)}\n"
    args.out.with_suffix(".md").write_text(text)
    print(table(runs))


if __name__ == "__main__":
    main()
