"""torch.compile of unchanged models with FP8 attention in a Trainer, and recomputation of what is compiled."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from tests.attention.test_attention_models import (
    HEADS,
    WIDTH,
    Model,
    Regression,
    Torch,
    attentions,
    trained,
    why,
)

pytestmark = pytest.mark.usefixtures("nothing_traced")


@pytest.mark.parametrize("what", ["whole", "blocks", "attention"])
def test_compiled_as_it_runs(what: str) -> None:
    torch.manual_seed(0)
    template = Model(depth=4 if what == "whole" else 10)  # more blocks than Dynamo compiles one code for
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template))
        parts = {
            "whole": [module.model],
            "blocks": module.model.blocks,
            "attention": [b.attention for b in module.model.blocks],
        }
        for part in parts[what] if compiled else ():
            part.compile(fullgraph=True, backend="aot_eager")
        plugin = trained(module)
        if compiled:
            assert {layer.ran for layer in plugin.summary.layers} == {None}
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_blocks_are_recomputed(reentrant: bool) -> None:
    torch.manual_seed(0)
    template = Model(reentrant=reentrant)
    found = []
    for compiled in (True, False):
        module = Regression(copy.deepcopy(template), lambda model, x: model(x.requires_grad_()))
        for block in module.model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        trained(module)
        found.append([torch.tensor(module.losses), *module.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)


def test_torchs_own_attention_is_compiled_whole_and_the_table_says_so() -> None:
    part = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    module = Regression(Torch(part, need_weights=False))
    module.model.compile(fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="torch.compile keeps the function of nn.MultiheadAttention whole"):
        plugin = trained(module)
    assert attentions(plugin.summary) == {"model.part": "BF16"}
    assert "leave its block uncompiled" in why(plugin.summary, "model.part")


def test_without_a_plugin_that_is_said_once() -> None:
    part = Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights=False)
    model, x = nn.Sequential(part, nn.Linear(WIDTH, WIDTH)), torch.randn(2, 8, WIDTH)
    convert_module(model, first_last_layers_bf16=False)
    model.compile(fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
                model(x)
    told = [str(each.message) for each in caught if "high precision" in str(each.message)]
    assert len(told) == 1
    assert "torch.compile keeps the function of nn.MultiheadAttention whole" in told[0]
