"""Suite ``models``: a training step of a Llama on a GPU, in BF16 and with every recipe, in eager mode and compiled.

Two blocks of Llama-8B (4,096 wide, an MLP of 14,336, 32 heads, 8 of keys) with a vocabulary of 8,192, from Hugging
Face's transformers; 8,192 tokens pass forward, backward, AdamW and the update of scales. Both blocks run in FP8; the
embedding and the output head stay in BF16. The first step's loss is compared with BF16's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.plan import Plan
from benchmarks.measuring.record import OURS, Candidate, Result, said
from benchmarks.measuring.side_by_side import timed
from benchmarks.measuring.timing import Contender
from lightning_fp8 import FP8FabricPrecision

SECONDS = 0.5
"""Measuring time per contender."""
BF16 = "BF16"
NEAR = 0.02
"""Largest relative difference between the first losses."""


@dataclass(frozen=True)
class Run:
    """A contender: a recipe (None is BF16), FP8 attention or BF16's, eager or compiled."""

    recipe: str | None = None
    attention: bool = False
    compiled: bool = False

    @property
    def by(self) -> str:
        recipe = self.recipe and f"{OURS}, {self.recipe}"
        more = " with FP8 attention" * self.attention + ", compiled" * self.compiled
        return f"{recipe or BF16}{more}"


EAGER = (
    Run(),
    Run("delayed"),
    Run("tensorwise"),
    Run("rowwise"),
    Run("blockwise"),
    Run("delayed", attention=True),
)
COMPILED = Run(compiled=True), Run("delayed", compiled=True), Run("tensorwise", compiled=True)


def unavailable(plan: Plan) -> str | None:
    if find_spec("transformers") is None:
        return "needs transformers"
    return None if plan.dry or plan.device.type == "cuda" else "needs a CUDA device"


def run(plan: Plan) -> Iterator[Result]:
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no tables of layers
    for name, runs in {"eager": EAGER, "compiled": COMPILED}.items():
        plan.say(f"models: a training step of a Llama, {name}")
        yield from timed(plan, list(_candidates(runs, plan)), (runs[0].by,), SECONDS)


def _candidates(runs: tuple[Run, ...], plan: Plan) -> Iterator[Candidate]:
    right = None
    for each in runs:
        result = Result("training step of a Llama", each.by, _tokens(plan.dry), "bfloat16")
        plan.say(f"models: {each.by}")
        try:
            step = training_step(each, plan)
            loss = float(step())
            right = loss if right is None else right
            step()
        except Exception as error:
            yield Candidate(replace(result, correct=False, note=said(error)), None)
            continue
        yield Candidate(replace(result, correct=abs(loss / right - 1) <= NEAR), Contender(step))


def _tokens(dry: bool) -> tuple[int, int]:
    """Number of sequences, and tokens per sequence."""
    return (2, 16) if dry else (4, 2048)


def training_step(contender: Run, plan: Plan) -> Callable[[], Tensor]:
    """A function that runs one step and returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, heads, groups = (64, 96, 2, 1) if plan.dry else (4096, 14336, 32, 8)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with plan.device:  # drawing on the CPU would take seconds
        model = LlamaForCausalLM(config).bfloat16()
    plugin = None
    if contender.recipe is not None:
        recipe: Any = contender.recipe
        plugin = FP8FabricPrecision(recipe=recipe, attention=contender.attention, first_last_layers_bf16=False)
        plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=plan.device.type == "cuda")
    tokens = torch.randint(0, config.vocab_size, _tokens(plan.dry), device=plan.device)
    forward = torch.compile(model) if contender.compiled else model

    def step() -> Tensor:
        if plugin is None:
            loss = forward(input_ids=tokens, labels=tokens).loss
        else:
            with plugin.forward_context():
                loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()  # also updates delayed scales
        optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step
