"""Train the GPT of ``train_gpt.py`` in BF16 and with every FP8 recipe, on several seeds; leave a table and a plot.

    python examples/compare_recipes.py --seeds 3 --steps 600 --jobs 2 --out docs/compare_recipes
    python examples/compare_recipes.py --attention --heads 2 --out docs/compare_attention    # attention in FP8, too
    python examples/compare_recipes.py --modules --out docs/compare_modules    # of lightning_fp8.TransformerLayers

Runs of one seed share their initial weights and their data, so that recipes differ by their rounding alone. With
``--orders 2`` BF16 also trains from the same weights on other data of the same text. A difference between recipes has
to exceed the difference between such runs.

An interrupted comparison continues: finished runs are in OUT.json, and each other run resumes from its last checkpoint,
which is saved in OUT.parts every 100 steps.

How the distance from BF16 develops is shown twice: over the steps, as the difference of the training losses; and over
the depth, as the distance of each block's result from what the same weights give in BF16, after training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import matplotlib.pyplot as plt
import torch
from bf16_on_cpu import fast_bf16, made_on  # the files beside this one
from block_distances import BlockDistances
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from train_gpt import GPT, StdlibBytes

from lightning_fp8 import FP8Precision
from lightning_fp8.convert.summary import ATTENTION
from lightning_fp8.numerics.recipes import RECIPES

plt.switch_backend("Agg")  # no screen needed


STEPS_OF_AN_EPOCH = 100
WITH_ATTENTION = "+attention"
"""Ends the name of a recipe whose attention runs in FP8, too."""


class Run(NamedTuple):
    """One training.

    Attributes:
        recipe: its name, or ``"bf16"``.
        seed: of the initial weights.
        order: 0 trains on the seed's own data, another number on other windows of the same text.
    """

    recipe: str
    seed: int
    order: int = 0

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.seed}" + f"/order {self.order}" * (self.order > 0)


class Data(StdlibBytes):
    """Batches in an order that depends on the step alone, so that a run that resumes has the same ones."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        first = self.trainer.global_step * self.batch_size
        return DataLoader(Subset(self.train, range(first, len(self.train))), self.batch_size, drop_last=True)


class Curve(L.Callback):
    """The losses of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = [*state_dict["losses"]]

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(round(outputs["loss"].item(), 4))


def fitted(
    model: L.LightningModule,
    data: L.LightningDataModule,
    recipe: str,
    steps: int,
    attention: bool,
    all_blocks: bool,
    more_callbacks: Sequence[L.Callback] = (),
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train a model in BF16 or by a recipe: its final validation loss, its training losses, and what ran in FP8.

    Checkpoints are saved in ``folder``, if any; a run resumes from the one that it finds there.
    """
    curve, in_bf16 = Curve(), recipe == "bf16"
    callbacks, last = [*more_callbacks], folder and folder / "last.ckpt"
    resumable: dict[str, Any] = {}
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "last", save_on_train_epoch_end=True, enable_version_counter=False))
        resumable = {"limit_train_batches": STEPS_OF_AN_EPOCH, "reload_dataloaders_every_n_epochs": 1}
    fp8: dict[str, Any] = {"recipe": recipe, "attention": attention, "first_last_layers_bf16": not all_blocks}
    fp8["weights_dtype"] = "bf16"  # as of the run in BF16
    trainer = L.Trainer(
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=bool(resumable),
        enable_model_summary=False,
        callbacks=[curve, TQDMProgressBar(refresh_rate=20), *callbacks],
        **resumable,
        **({"precision": "bf16-true"} if in_bf16 else {"plugins": [FP8Precision(**fp8)]}),
    )
    with fast_bf16():
        trainer.fit(model, data, ckpt_path=last if last and last.exists() else None)
        trainer.limit_val_batches = 1.0
        (metrics,) = trainer.validate(model, data, verbose=False)
    plugin = trainer.precision_plugin
    layers = plugin.summary.layers if isinstance(plugin, FP8Precision) and plugin.summary else ()
    ran = [layer.kind for layer in layers if layer.ran]
    return {
        "val_loss": metrics["val_loss"],
        "losses": curve.losses,
        "fp8_layers": len(ran) - ran.count(ATTENTION),
        "fp8_attentions": ran.count(ATTENTION),
    }


def train(
    run: Run,
    folder: Path,
    threads: int,
    steps: int,
    width: int,
    depth: int,
    heads: int,
    length: int,
    batch_size: int,
    lr: float,
    attention: bool,
    all_blocks: bool,
    modules: bool,
) -> dict[str, Any]:
    """One run: its final validation loss in nats per byte, its training losses, how much ran in FP8, and on what."""
    torch.set_num_threads(threads)
    L.seed_everything(run.seed)
    model = GPT(width=width, depth=depth, heads=heads, lr=lr, modules=modules)
    seed_of_data = run.seed + 1000 * run.order
    data = Data(length=length, batch_size=batch_size, val_sequences=65_536 // length, seed=seed_of_data)
    recipe, attention = run.recipe.removesuffix(WITH_ATTENTION), attention or run.recipe.endswith(WITH_ATTENTION)
    distances = [] if recipe == "bf16" else [BlockDistances(model.blocks)]
    result = fitted(model, data, recipe, steps, attention, all_blocks, distances, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return result | {"made_on": made_on()} | ({"block_distances": distances[0].distances} if distances else {})


def table(runs: dict[str, dict[str, Any]], recipes: list[str], seeds: int, orders: int = 1) -> str:
    """Markdown: of each recipe the mean final validation loss, and its differences from BF16's.

    The differences are those of runs that share their seed and data: their mean, and its standard error over seeds.
    """
    rows = [
        "| run | validation loss, mean | spread over seeds (max - min) | against BF16 | standard error | FP8 layers "
        "| FP8 attentions |",
        "|---|---|---|---|---|---|---|",
    ]
    kinds = [(recipe, 0) for recipe in recipes] + [("bf16", order) for order in range(1, orders)]
    for recipe, order in kinds:
        losses = [runs[Run(recipe, seed, order).name]["val_loss"] for seed in range(seeds)]
        from_bf16 = differences(runs, recipe, seeds, order)
        error = f"{statistics.stdev(from_bf16) / seeds**0.5:.2%}" if seeds > 1 else ""
        first = runs[Run(recipe, 0, order).name]
        rows.append(
            f"| {recipe}{', other data' * (order > 0)} | {statistics.mean(losses):.4f} | "
            f"{max(losses) - min(losses):.4f} | {statistics.mean(from_bf16):+.2%} | {error} | "
            f"{first['fp8_layers']} | {first.get('fp8_attentions', 0)} |"
        )
    return "\n".join(rows)


def differences(runs: dict[str, dict[str, Any]], recipe: str, seeds: int, order: int = 0) -> list[float]:
    """Of each seed: how far the final validation loss is above that of BF16, as a share of it."""
    of_seeds = [(Run(recipe, seed, order).name, f"bf16/{seed}") for seed in range(seeds)]
    return [runs[name]["val_loss"] / runs[baseline]["val_loss"] - 1 for name, baseline in of_seeds]


T_OF_95_PERCENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a two-sided interval of 95 %, for 2 to 10 seeds."""


def conclusion(runs: dict[str, dict[str, Any]], recipes: list[str], seeds: int, orders: int = 1) -> str:
    """What the differences of the recipes say beside the noise; nothing for a single seed."""
    if seeds < 2:
        return ""
    lines = []
    noise = [abs(each) for order in range(1, orders) for each in differences(runs, "bf16", seeds, order)]
    if noise:
        span = f"{min(noise):.2%} to {max(noise):.2%}"
        lines.append(f"In single seeds, BF16 on other data differs from BF16 by {span}.")
    t = T_OF_95_PERCENT[min(seeds, 10) - 2]
    sure = "at least 95 %" if seeds > 10 else "95 %"
    lines.append(f"The mean difference of a recipe from BF16, in an interval of {sure} (Student's t, {seeds} seeds):\n")
    clear = []
    for recipe in recipes:
        if recipe != "bf16":
            each = differences(runs, recipe, seeds)
            mean, reach = statistics.mean(each), t * statistics.stdev(each) / seeds**0.5
            worse = sum(one > 0 for one in each)
            lines.append(f"- {recipe}: {mean - reach:+.2%} to {mean + reach:+.2%}, worse in {worse} of {seeds} seeds")
            clear += [recipe] * (abs(mean) > reach)
    without = f"The interval of {', '.join(clear)} does not contain 0." if clear else "Every interval contains 0."
    if 0 < len(clear) < len(recipes) - 1:
        without += " Among several intervals, one can miss 0 by chance."
    lines.append(f"\n{without} More seeds would make them narrower.")
    return "\n".join(lines) + "\n\n"


def distances_table(runs: dict[str, dict[str, Any]], recipes: list[str], seeds: int) -> str:
    """Markdown: each recipe's distance of each block's result from BF16, a mean over the runs that measured it."""
    rows = []
    for recipe in recipes:
        measured = [run for seed in range(seeds) if (run := runs[f"{recipe}/{seed}"].get("block_distances"))]
        if measured:
            name = recipe if len(measured) == seeds else f"{recipe}, {len(measured)} of {seeds} seeds"
            rows.append([name, *(f"{statistics.mean(each):.2%}" for each in zip(*measured))])
    if not rows:
        return ""
    head = ["distance after block", *map(str, range(1, len(rows[0])))]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return (
        "After training, the distance of each block's result from what the same weights give in BF16, relative to its"
        " norm, in the first batch of the validation:\n\n" + "\n".join(lines) + "\n\n"
    )


def plot(runs: dict[str, dict[str, Any]], recipes: list[str], seeds: int, path: Path) -> None:
    """Smoothed training loss, and its difference from the BF16 run of the same seed."""

    def smooth(losses: list[float], window: int = 25) -> Tensor:
        return torch.tensor(losses).unfold(0, window, 1).mean(-1)

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 2])
    for color, recipe in enumerate(recipes):
        curves = torch.stack([smooth(runs[f"{recipe}/{seed}"]["losses"]) for seed in range(seeds)])
        baseline = torch.stack([smooth(runs[f"bf16/{seed}"]["losses"]) for seed in range(seeds)])
        steps = torch.arange(curves.shape[1]) + 25
        above.plot(steps, curves.mean(0), color=f"C{color}", label=recipe, linewidth=1.2)
        above.fill_between(steps, curves.amin(0), curves.amax(0), color=f"C{color}", alpha=0.12, linewidth=0)
        if recipe != "bf16":
            below.plot(steps, 100 * (curves / baseline - 1).mean(0), color=f"C{color}", linewidth=1.2)
    above.set_ylabel("training loss, nats per byte\n(mean and range over seeds)")
    above.legend()
    below.axhline(0, color="black", linewidth=0.8)
    below.set_ylabel("difference from BF16\nof the same seed, %")
    below.set_xlabel("optimizer step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    known = [*RECIPES, *(name + WITH_ATTENTION for name in RECIPES)]
    parser = argparse.ArgumentParser(description="Compare FP8 recipes with BF16 on the GPT example.")
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=known, help="beside BF16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", type=int, default=1, help="of BF16's data; more than one show the noise")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of context")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--attention", action="store_true", help="attention in FP8, too")
    parser.add_argument("--modules", action="store_true", help="blocks of lightning_fp8.TransformerLayer")
    parser.add_argument("--all-blocks", action="store_true", help="the first and the last block in FP8, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, which share the processor's cores")
    parser.add_argument("--out", type=Path, default=Path("compare_recipes"), help="path of the .md, .png and .json")
    args = parser.parse_args()

    record = args.out.with_suffix(".json")
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "recipes", "seeds", "orders", "jobs")}
    recipes = ["bf16", *args.recipes]
    saved = json.loads(record.read_text()) if record.exists() else {"settings": settings, "runs": {}}
    if saved["settings"] != settings:
        raise SystemExit(f"{record} holds runs with {saved['settings']}, not {settings}; choose another --out")
    runs = saved["runs"]
    parts = args.out.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    asked = [
        Run(recipe, seed, order)
        for seed in range(args.seeds)
        for recipe in recipes
        for order in range(args.orders if recipe == "bf16" else 1)
    ]
    threads = max(torch.get_num_threads() // args.jobs, 1)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        training = {
            pool.submit(train, run, parts / run.name.replace("/", "-"), threads, **settings): run
            for run in asked
            if run.name not in runs
        }
        for future in as_completed(training):
            run = training[future]
            runs[run.name] = future.result()
            print(f"\n--- {run.name}: run {len(runs)} of {len(asked)} is done", flush=True)
            temporary = record.with_suffix(".json.part")
            temporary.write_text(json.dumps(saved))
            temporary.replace(record)
    parts.rmdir()

    command = f"python {shlex.join(['examples/compare_recipes.py', *sys.argv[1:]])}"
    what = "FP8 recipes" + ", with FP8 attention," * args.attention + " in `TransformerLayer`s" * args.modules
    what += f" of width {args.width}" * (args.width != parser.get_default("width"))
    distances = distances_table(runs, recipes, args.seeds)
    results = table(runs, recipes, args.seeds, args.orders)
    follows = conclusion(runs, recipes, args.seeds, args.orders)
    places = " and on ".join(dict.fromkeys(run["made_on"] for run in runs.values()))
    text = (
        f"# {what} against BF16\n\nMade on {places}; by\n\n```\n{command}\n```\n\n"
        f"{results}\n\n{follows}{distances}![training curves]({args.out.with_suffix('.png').name})\n"
    )
    args.out.with_suffix(".md").write_text(text)
    plot(runs, recipes, args.seeds, args.out.with_suffix(".png"))
    print(results)


if __name__ == "__main__":
    main()
