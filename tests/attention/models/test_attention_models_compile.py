"""torch.compile of unchanged models with FP8 attention in a Trainer, and recomputation of what is compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from tests.attention.models.test_attention_models import (
    HEADS,
    WIDTH,
    Model,
    Regression,
    Torch,
    attentions,
    trained,
    why,
)
from tests.tiers import covering, thorough

pytestmark = pytest.mark.usefixtures("nothing_traced")


@thorough
@pytest.mark.parametrize("what", covering(["whole", "blocks", "attention"], lambda what: {"whole"} & {what}))
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


@thorough
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


MULTIHEAD = "nn.MultiheadAttention does not run in FP8"


def test_nn_multihead_attention_stays_in_high_precision() -> None:
    """To the bit, although torch.compile does not trace into it and calls the wrapper outside the module."""
    torch.manual_seed(0)
    model = nn.Sequential(Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights=False))
    x = torch.randn(2, 8, WIDTH)
    exact = model(x)
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8"):
        convert_module(model, skip=("*",))
    model.compile(fullgraph=True, backend="aot_eager")
    with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
        assert torch.equal(model(x), exact)


def test_the_table_names_the_way_out() -> None:
    module = Regression(Torch(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights=False))
    twin = copy.deepcopy(module)
    plugin = trained(module)
    assert attentions(plugin.summary) == {"model.part": "BF16"}
    assert why(plugin.summary, "model.part").startswith(f"{MULTIHEAD}; use lightning_fp8.MultiheadAttention, or call")
    trained(twin, attention=False)
    assert module.losses == twin.losses
