"""Layers of one model of which some are compiled: the same scales to the bit, few graphs over many lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DotProductAttention, LayerNormLinear, fp8_autocast, fp8_state_dict
from tests.tiers import thorough


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


class CountedGraphs:
    """Runs a graph as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def numbers_of_training(model: nn.Sequential) -> list[Tensor]:
    """Three steps of two micro-batches, which ask for kept weights, of other lengths each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    numbers = []
    for layer in model:
        layer.history.steps = 0  # an optimizer is known: the first step's scales stand, too
    for lengths in ((5, 9), (7, 3), (11, 4)):
        for first, length in zip((True, False), lengths):
            y = torch.randn(length, 16, generator=generator)
            with fp8_autocast(fp8_recipe="delayed"):
                for layer in model:
                    y = layer(y, is_first_microbatch=first)
            y.square().mean().backward()
            numbers.append(y.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    with fp8_autocast(fp8_recipe="delayed"):
        state = fp8_state_dict(model)
    return [*numbers, state["scale"], state["amax_history"], *(p.detach() for p in model.parameters())]


@thorough
def test_layers_beside_compiled_ones_have_the_scales_of_eager_code() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(LayerNormLinear(16, 16) for _ in range(2)))
    mixed, backend = copy.deepcopy(model), CountedGraphs()
    mixed[1].compile(fullgraph=True, dynamic=True, backend=backend)
    pairs = zip(numbers_of_training(mixed), numbers_of_training(model))
    assert [index for index, pair in enumerate(pairs) if not torch.equal(*pair)] == []
    assert backend.graphs <= 4  # is_first_microbatch is True and False, and after the first update there are scales


def test_attention_compiles_for_lengths_that_vary() -> None:
    attention, backend = DotProductAttention(2, 8, attn_mask_type="causal_bottom_right"), CountedGraphs()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in ((5, 5), (9, 9), (4, 9), (3, 7)):
        q, k, v = torch.randn(queries, 2, 2, 8), torch.randn(keys, 2, 2, 8), torch.randn(keys, 2, 2, 8)
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert backend.graphs == 2  # as many queries as keys, and fewer
