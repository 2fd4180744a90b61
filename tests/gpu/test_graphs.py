"""Captured steps, graphed modules and ``mode="reduce-overhead"``, each bit for bit as eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_fp8 import LayerNormMLP, convert_module, fp8_autocast, fp8_state_dict, optimizer_steps
from lightning_fp8.fp8_region import FP8Context, fp8_context
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.transformer_engine import pytorch as te

WIDTH, STEPS = 512, 8


@pytest.fixture(autouse=True)
def _no_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "are_captured", False)


class Block(nn.Module):
    """Two layers that read one input, one that reads their sum, and a fused module."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = LayerNormMLP(WIDTH, 2 * WIDTH) if fused else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.down(self.gate(x) + self.up(x)))  # type: ignore[no-any-return]


class Run:
    """A block, its optimizer, and the input that its step reads."""

    def __init__(self, recipe: str, fused: bool = True) -> None:
        torch.manual_seed(0)
        self.model = Block(fused).to("cuda", torch.bfloat16)
        convert_module(self.model, first_last_layers_bf16=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, capturable=True)
        self.x = torch.empty(384, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.recipe = make_recipe(recipe)
        self.call: Callable[[Tensor], Tensor] = self.model

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=self.recipe):
            loss = self.call(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def read(self, index: int) -> None:
        generator = torch.Generator("cuda").manual_seed(index)
        self.x.normal_(std=1.0 + index, generator=generator)

    def warm_up(self) -> None:
        for index in range(3):
            self.read(index)
            self.step()
            torch.cuda.synchronize()

    def evaluated(self) -> Tensor:
        """An evaluation in Fabric with ``cache_fp8_weights=True``."""
        with torch.no_grad(), fp8_context(FP8Context(self.recipe, weight_period=0)):
            return self.model(self.x)  # type: ignore[no-any-return]


def assert_same(one: Run, other: Run) -> None:
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters()):
        assert torch.equal(a, b), name
    states: list[dict[str, Any]] = [fp8_state_dict(run.model) for run in (one, other)]
    for name in ("scale", "amax_history", "seen"):
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_step(recipe: str) -> None:
    eager, captured = Run(recipe), Run(recipe)
    eager.warm_up()
    captured.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured.step()
    for index in range(3, STEPS):
        for run in (eager, captured):
            run.read(index)
        graph.replay()
        assert torch.equal(loss, eager.step())
    assert_same(captured, eager)


@pytest.mark.filterwarnings("ignore:FP8 weights are not cached")
def test_evaluations_between_replays_use_the_current_weights() -> None:
    eager, captured = Run("delayed"), Run("delayed")
    eager.warm_up()
    captured.warm_up()
    captured.evaluated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for index in range(3, STEPS):
        for run in (eager, captured):
            run.read(index)
        graph.replay()
        eager.step()
        assert torch.equal(captured.evaluated(), eager.evaluated())


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphed_modules(recipe: str) -> None:
    eager, graphed = Run(recipe), Run(recipe)
    eager.warm_up()
    graphed.warm_up()
    graphed.optimizer.zero_grad()
    sample = torch.randn_like(graphed.x).mul_(1e4)  # larger than any later input: no amax may remain
    graphed.call = te.make_graphed_callables(graphed.model, (sample,), enabled=True, recipe=graphed.recipe)
    for index in range(3, STEPS):
        for run in (eager, graphed):
            run.read(index)
        assert torch.equal(graphed.step(), eager.step())
    assert_same(graphed, eager)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_reduce_overhead(recipe: str) -> None:
    eager, compiled = Run(recipe, fused=False), Run(recipe, fused=False)
    compiled.call = torch.compile(compiled.model, mode="reduce-overhead")
    counters.clear()
    for index in range(STEPS):
        for run in (eager, compiled):
            run.read(index)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled.step(), eager.step())
    assert_same(compiled, eager)
    assert not counters["inductor"]["cudagraph_skips"]
