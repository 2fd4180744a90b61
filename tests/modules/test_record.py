"""What a layer says it did."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import Linear, convert_module, fp8_autocast
from lightning_fp8.modules.record import LayerRecord
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.traced import was_traced
from tests.tiers import covering


def counts(record: LayerRecord) -> dict[str, int]:
    return {name: getattr(record, name) for name in record.COUNTS if getattr(record, name)}


def test_forwards_are_counted_by_what_they_multiplied_in() -> None:
    linear = Linear(16, 8)
    assert not linear.record.ran
    with fp8_autocast():
        linear(torch.randn(3, 5, 16))
        linear(torch.randn(0, 16))
        with fp8_autocast(enabled=False):
            linear(torch.randn(2, 16))
    linear(torch.randn(7, 16))
    linear.eval()
    with fp8_autocast():
        linear(torch.randn(2, 16))
    assert counts(linear.record) == {"fp8": 2, "high_precision": 2, "evaluations": 1, "evaluations_in_fp8": 1}
    assert linear.record.ran
    linear.record.clear()
    assert not counts(linear.record)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_counts_once(reentrant: bool) -> None:
    linear = Linear(16, 8)
    with fp8_autocast():
        checkpoint(linear, torch.randn(4, 16, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert counts(linear.record) == {"fp8": 1}


def test_copies_and_retyped_layers_have_records_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    keys = list(model.state_dict())
    convert_module(model)
    with fp8_autocast():
        model(torch.randn(4, 16))
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for module in (model, twin, stored):
        assert list(module.state_dict()) == keys
        assert counts(module[1].record) == {"fp8": 1}
    with fp8_autocast():
        twin(torch.randn(4, 16))
    assert [module[1].record.fp8 for module in (model, twin, stored)] == [1, 2, 1]


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    covering(itertools.product(RECIPES, (False, True)), lambda row: {row} & {("delayed", True), ("mxfp8", False)}),
)
def test_compiled_code_counts_nothing_and_is_shared_by_equal_blocks(recipe: str, recompute: bool) -> None:
    features = 501 + 16 * list(RECIPES).index(recipe) + 256 * recompute  # a shape that no other test compiles
    blocks, counter = [Block(features) for _ in range(3)], CompileCounter()
    assert not was_traced(features, features)

    def forward(block: Block, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if recompute else block(x)

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend=counter, fullgraph=True)
    with fp8_autocast(fp8_recipe=recipe):
        for block in blocks:
            compiled(block, torch.randn(4, features))
    assert counter.frame_count == 1
    assert was_traced(features, features)
    assert not any(block.linear.record.ran for block in blocks)
