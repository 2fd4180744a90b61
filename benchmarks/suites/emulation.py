"""Suite ``emulation``: the cost of FP8 on the CPU, by a training step of Hugging Face's Llama.

The model is 512 wide: 4 blocks, 8 heads, an MLP of 1,376, a vocabulary of 2,048, random BF16 weights. All blocks run in
FP8. 2 sequences of 128 tokens pass forward, backward, AdamW and the update of delayed scales, on one thread.

Steps of all recipes alternate. A step's time is the process's CPU time. It does not include other processes' time, but
is affected by their use of caches and clocks. Recipes are therefore compared by lower quartiles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Result
from benchmarks.measuring.timing import Contender, measure
from lightning_fp8 import FP8FabricPrecision
from lightning_fp8.numerics.recipes import RECIPES

BF16 = "BF16"
LIMITS = {**dict.fromkeys(RECIPES, 1.6), "mxfp8": 1.7}
"""Limits of a recipe's cost, relative to BF16."""
SECONDS = 20.0
"""Measuring time per recipe; a step takes tenths of a second."""


class ProcessorClock:
    """Measures CPU time of this process."""

    def round(self, contenders: Sequence[Contender]) -> list[float]:
        seconds = []
        for contender in contenders:
            start = time.process_time()
            contender.call()
            seconds.append(time.process_time() - start)
        return seconds


def unavailable(plan: Plan) -> str | None:
    return None if find_spec("transformers") else "needs transformers"


def run(plan: Plan) -> Iterator[Result]:
    plan.say("emulation: a training step of a Llama on one thread")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no tables of layers
    names = (None, *RECIPES)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = [Contender(training_step(recipe, plan.dry)) for recipe in names]
        bf16, *others = measure(ProcessorClock(), steps, plan.seconds(SECONDS))
    finally:
        torch.set_num_threads(num_threads)
    work, shape = "training step of a Llama", _tokens(plan.dry)
    yield Result(work, BF16, shape, "bfloat16", times=bf16)
    for recipe, times in zip(RECIPES, others):
        over, target = {BF16: bf16.low / times.low}, {f"over {BF16}": 1 / LIMITS[recipe]}
        yield Result(work, f"{OURS}, {recipe}", shape, "bfloat16", times=times, over=over, target=target)


def _tokens(dry: bool) -> tuple[int, int]:
    """Number of sequences, and tokens per sequence."""
    return (2, 16) if dry else (2, 128)


def training_step(recipe: str | None, dry: bool) -> Callable[[], None]:
    """A function that runs one step; None is BF16."""
    return step_and_model(recipe, dry)[0]


def step_and_model(recipe: str | None, dry: bool) -> tuple[Callable[[], None], nn.Module]:
    """:func:`training_step`, and the model that it trains."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, depth, heads = (64, 96, 1, 2) if dry else (512, 1376, 4, 8)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    plugin = None
    if recipe is not None:
        plugin = FP8FabricPrecision(recipe=recipe, first_last_layers_bf16=False)  # type: ignore[arg-type]
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, config.vocab_size, _tokens(dry))

    def loss() -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    def step() -> None:
        if plugin is None:
            loss().backward()
        else:
            with plugin.forward_context():
                of_step = loss()
            of_step.backward()
        optimizer.step()  # also updates delayed scales
        optimizer.zero_grad()

    return step, model
