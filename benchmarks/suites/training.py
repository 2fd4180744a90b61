"""Suite ``training``: a training step of the GPT example on the CPU, in BF16 and with every FP8 recipe.

It includes forward, backward, scale update, clipping and AdamW, and shows the cost of emulating FP8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import Contender, HostClock, measure
from examples.train_gpt import GPT, StdlibBytes
from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.numerics.recipes import RECIPES

ALL = ("bf16", *RECIPES)
SECONDS = 4.0
"""Per recipe; a step takes tenths of a second."""


def unavailable(plan: Plan) -> str | None:
    return None


def run(plan: Plan) -> Iterator[Result]:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tables of layers
    width, depth, batch_size = (32, 3, 2) if plan.dry else (256, 6, 16)
    data = StdlibBytes(batch_size=batch_size)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    steps = [Contender(training_step(recipe, width, depth, batch)) for recipe in ALL]
    plan.say(f"training: a GPT of {depth} blocks, {width} wide, with {len(ALL)} recipes")
    for recipe, times in zip(ALL, measure(HostClock(), steps, plan.seconds(SECONDS))):
        by = "torch" if recipe == "bf16" else OURS
        yield Result(f"training step, {recipe}", by, tuple(batch.shape), "bfloat16", times=times)


def training_step(recipe: str, width: int, depth: int, batch: torch.Tensor) -> Callable[[], None]:
    """A function that runs one step."""
    torch.manual_seed(0)
    model = GPT(width=width, depth=depth).bfloat16()
    plugin = None if recipe == "bf16" else FP8FabricPrecision(recipe=recipe)  # type: ignore[arg-type]
    if plugin is not None:
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        if plugin is None:
            loss = model.loss(batch)
        else:
            with plugin.forward_context():
                loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
