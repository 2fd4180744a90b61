"""Weights are replaced in a model with delayed scales: with the state that belongs to them, a reset, or a notice."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import (
    DelayedScaling,
    Linear,
    TransformerLayer,
    convert_module,
    fp8_autocast,
    fp8_model_init,
    fp8_state_dict,
    load_fp8_state_dict,
    reset_fp8_scales,
    with_master_weights,
)
from tests.small import mlp

NOTICE = "load_state_dict has changed weights"
RECIPE = DelayedScaling(amax_history_len=8)


def inputs(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


def train(model: nn.Module, steps: int, scale: float = 1.0, lr: float = 0.05, recipe: Any = RECIPE) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
    for _ in range(steps):
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(inputs(scale)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module) -> Tensor:
    with torch.no_grad(), fp8_autocast(fp8_recipe=RECIPE):
        return model(inputs())


def built(ours: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(Linear) if ours else convert_module(mlp())


def notices(action: Callable[[], Any]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return sum(NOTICE in str(each.message) for each in caught)


@pytest.mark.parametrize("ours", [False, True], ids=["converted", "our modules"])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_model_whose_scales_are_reset_trains_as_a_new_one(ours: bool, interval: int) -> None:
    recipe = DelayedScaling(amax_history_len=8, interval=interval)
    model, new = built(ours), built(ours)
    train(model, 3, 1e4, lr=0.0, recipe=recipe)  # a burst of bad data
    stale = copy.deepcopy(fp8_state_dict(model))
    assert (stale["scale"] > 0).all()
    assert reset_fp8_scales(model) is None
    assert train(model, 4, recipe=recipe) == (expected := train(new, 4, recipe=recipe))
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), new.state_dict().values()))
    one, two = fp8_state_dict(model), fp8_state_dict(new)
    assert all(torch.equal(one[key], two[key]) if isinstance(one[key], Tensor) else one[key] == two[key] for key in two)
    burst = built(ours)
    load_fp8_state_dict(burst, stale)
    assert train(burst, 4, recipe=recipe) != expected


def test_a_part_is_reset_and_the_rest_keeps_its_scales() -> None:
    model = built()
    train(model, 3)
    before = fp8_state_dict(model)
    reset_fp8_scales(model[2])
    after = fp8_state_dict(model)
    part = torch.tensor([name.startswith("2.") for name in before["names"]])
    assert part.sum() == 3
    for key in ("scale", "seen", "counts", "amax_history"):
        assert not after[key][..., part].any()
        assert torch.equal(after[key][..., ~part], before[key][..., ~part])
    assert before["scale"].all()
    assert (after["updates"], after["fp8_format"]) == (before["updates"], before["fp8_format"])
    assert model[2].slots is not None
    assert not any(slot.scale_is_nonzero() for slot in model[2].slots.values())
    reset_fp8_scales(nn.Linear(2, 2))  # without FP8 layers there is nothing to reset


def test_reset_takes_a_module() -> None:
    with pytest.raises(TypeError, match="reset_fp8_scales takes a torch.nn.Module"):
        reset_fp8_scales("model.pt")  # type: ignore[arg-type]


@pytest.mark.parametrize("use", [lambda model: train(model, 3), evaluate], ids=["training", "evaluation"])
@pytest.mark.parametrize("ours", [False, True], ids=["converted", "our modules"])
def test_other_weights_without_state_are_told_once(ours: bool, use: Callable[[nn.Module], Any]) -> None:
    model = built(ours)
    first = copy.deepcopy(model.state_dict())
    train(model, 2)
    assert notices(lambda: model.load_state_dict(first)) == 0  # state may follow
    with pytest.warns(UserWarning, match=NOTICE) as caught:
        use(model)
    (said,) = [str(each.message) for each in caught if NOTICE in str(each.message)]
    assert "reset_fp8_scales(model)" in said
    assert "load_fp8_state_dict(model, state)" in said
    assert notices(lambda: use(model)) == 0


def test_equal_weights_and_weights_of_a_new_model_are_not_told() -> None:
    model = built()
    assert notices(lambda: (model.load_state_dict(built(seed=1).state_dict()), train(model, 2))) == 0
    own = copy.deepcopy(model.state_dict())
    for state in (model.state_dict(), own, {name: value.double() for name, value in own.items()}):
        for assign in (False, True):
            model.load_state_dict(state, assign=assign)
            model.float()
            assert notices(lambda: evaluate(model)) == 0
    assert notices(lambda: (model.load_state_dict({}, strict=False), evaluate(model))) == 0


def test_weights_that_are_assigned_are_told() -> None:
    model = built()
    train(model, 2)
    model.load_state_dict(built(seed=1).state_dict(), assign=True)
    assert notices(lambda: evaluate(model)) == 1


@pytest.mark.parametrize("state_first", [False, True])
def test_resuming_in_either_order_tells_nothing(state_first: bool, tmp_path: Path) -> None:
    model = built()
    train(model, 2)
    torch.save([model.state_dict(), fp8_state_dict(model)], tmp_path / "a.pt")
    train(model, 2)
    weights, state = torch.load(tmp_path / "a.pt", weights_only=True)

    def load() -> None:
        if state_first:
            load_fp8_state_dict(model, state)
        model.load_state_dict(weights)
        if not state_first:
            load_fp8_state_dict(model, state)

    assert notices(lambda: (load(), evaluate(model), train(model, 1))) == 0
    assert notices(lambda: (model.load_state_dict(weights), reset_fp8_scales(model), train(model, 1))) == 0
    assert notices(lambda: (model.load_state_dict(weights), train(model, 1))) == 1  # later weights have no state
    assert notices(lambda: (load(), train(model, 1))) == 0
    assert notices(lambda: (model.load_state_dict(weights), train(model, 1))) == 1  # another time since the last state


def test_averages_that_are_swapped_in_for_each_evaluation_are_told_once() -> None:
    model = built()
    average = copy.deepcopy(model.state_dict())
    said = []
    for _ in range(3):
        train(model, 1)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average)
        said.append(notices(lambda: evaluate(model)))
        model.load_state_dict(own)
        said.append(notices(lambda: train(model, 1)))
    assert sum(said) == 1


def test_weights_stored_in_fp8() -> None:
    with fp8_model_init(preserve_high_precision_init_val=True):
        model = built()
    optimizer = with_master_weights(torch.optim.SGD(model.parameters(), 1.0))
    own = copy.deepcopy(model.state_dict())
    with fp8_autocast(fp8_recipe=RECIPE):
        loss = model(inputs()).square().mean()
    loss.backward()
    optimizer.step()
    for assign in (False, True):
        equal = copy.deepcopy(model.state_dict())
        model.load_state_dict(equal, assign=assign)
        assert notices(lambda: evaluate(model)) == 0
    assert notices(lambda: (model.load_state_dict(own), evaluate(model))) == 1


def test_other_recipes_and_other_precision_tell_nothing() -> None:
    model = built()
    train(model, 2)
    model.load_state_dict(built(seed=1).state_dict())
    assert notices(lambda: (model(inputs()), train(model, 1, recipe="tensorwise"))) == 0
    assert notices(lambda: evaluate(model)) == 1


def test_fused_layers() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(32, 64, num_attention_heads=2)
    with fp8_autocast(fp8_recipe=RECIPE):
        y = layer(torch.randn(4, 2, 32))
    y.sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    other = {name: value + 1 if name.endswith("fc2_weight") else value for name, value in layer.state_dict().items()}
    layer.load_state_dict(other)
    with pytest.warns(UserWarning, match=NOTICE), fp8_autocast(fp8_recipe=RECIPE):
        layer(torch.randn(4, 2, 32))


def test_sharded_weights(one_rank: Any) -> None:
    """A sharded checkpoint is read into the memory of the weights, before ``load_state_dict`` is called with it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = built()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    train(model, 2)
    own = copy.deepcopy(get_model_state_dict(model))
    assert notices(lambda: (set_model_state_dict(model, own), evaluate(model))) == 0
    train(model, 1)

    def read_in_place() -> None:
        state = get_model_state_dict(model)
        for name, value in state.items():
            value.copy_(own[name])
        set_model_state_dict(model, state)

    assert notices(lambda: (read_in_place(), load_fp8_state_dict(model, fp8_state_dict(model)), evaluate(model))) == 0
    train(model, 1)
    assert notices(lambda: (read_in_place(), evaluate(model))) == 1
    reset_fp8_scales(model)
    train(model, 1)
    assert notices(lambda: (set_model_state_dict(model, own), evaluate(model))) == 1
