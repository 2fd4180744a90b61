"""``fp8_autocast`` inside a function that ``torch.compile(fullgraph=True)`` compiles: it trains as eager code does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_fp8 as fp8

MADE_OUTSIDE = {"tensorwise": fp8.Float8CurrentScaling(), "delayed": fp8.DelayedScaling(amax_history_len=4)}

REGIONS: dict[str, Callable[[], Any]] = {
    "default": lambda: fp8.fp8_autocast(),
    "name": lambda: fp8.fp8_autocast(fp8_recipe="blockwise"),
    "object": lambda: fp8.fp8_autocast(fp8_recipe=MADE_OUTSIDE["tensorwise"]),
    "delayed object": lambda: fp8.fp8_autocast(fp8_recipe=MADE_OUTSIDE["delayed"]),
    "not enabled": lambda: fp8.fp8_autocast(enabled=False),
}
MAKING: dict[str, Callable[[], Any]] = {
    "made inside": lambda: fp8.fp8_autocast(fp8_recipe=fp8.Float8BlockScaling(power_2_scale=False)),
    "mapping": lambda: fp8.fp8_autocast(fp8_recipe={"name": "tensorwise", "power_2_scale": True}),
}
MAKES_RECIPES = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def trained(linear: fp8.Linear, region: Callable[[], Any], compiled: bool, fullgraph: bool = True) -> list[Tensor]:
    """Outputs and the weight of three steps, between which delayed scales move."""
    linear = copy.deepcopy(linear)

    def forward(x: Tensor) -> Tensor:
        with region():
            return linear(x)  # type: ignore[return-value]

    torch.compiler.reset()
    call = torch.compile(forward, backend="aot_eager", fullgraph=fullgraph) if compiled else forward
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    outputs = []
    for step in range(3):
        x = torch.linspace(-1.0, 1.0 + step, 4 * 16).view(4, 16)
        outputs.append(call(x))
        outputs[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*outputs, linear.weight]


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_inside_of_a_graph(name: str) -> None:
    torch.manual_seed(0)
    linear = fp8.Linear(16, 16)
    pairs = zip(*(trained(linear, REGIONS[name], compiled) for compiled in (True, False)))
    assert all(torch.equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("name", MAKING)
def test_a_recipe_that_is_made_inside_of_a_graph(name: str) -> None:
    torch.manual_seed(0)
    linear = fp8.Linear(16, 16)
    expected = trained(linear, MAKING[name], compiled=False)
    if not MAKES_RECIPES:
        with pytest.raises(Exception, match="torch.compile before torch 2.13 cannot make a recipe: make it outside"):
            trained(linear, MAKING[name], compiled=True)
    found = trained(linear, MAKING[name], compiled=True, fullgraph=MAKES_RECIPES)
    assert all(map(torch.equal, found, expected))
