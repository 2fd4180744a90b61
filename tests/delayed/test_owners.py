"""Scales follow the optimizer that trains their layers, also where parameters and optimizers change."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer

from lightning_fp8 import Linear, convert_module, fp8_autocast
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.owners import IDLE_ROUNDS
from lightning_fp8.delayed.watch import UPDATES_OF_OTHERS
from lightning_fp8.numerics.scaled import Role

LARGER = 1000.0
E4M3_MAX = 448.0


class Block(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.q(x) + self.k(x)
        return y


class Adapted(nn.Module):
    """A frozen layer and the parameter that is trained in its place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.adapter
        return y


def converted(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    convert_module(model, first_last_layers_bf16=False)
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int, factor: float = 1.0) -> float:
    """Train on random inputs; the largest magnitude of the last one."""
    for _ in range(steps):
        x = torch.randn(8, 16) * factor
        with fp8_autocast(fp8_recipe="delayed"):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(x.abs().max())


def input_scale(layer: Any) -> float:
    return float(layer.slots[Role.INPUT].scale)


@pytest.mark.parametrize("change", ["assigned", "replaced", "adapted"])
def test_scales_follow_a_new_optimizer_of_new_parameters(change: str) -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    train(model, SGD(model.parameters(), 1e-9), 3)
    if change == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    elif change == "replaced":
        for layer in list(model):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            layer.bias = nn.Parameter(layer.bias.detach().clone())
    else:
        model[0] = Adapted(model[0])
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], 1e-9)
    largest = train(model, optimizer, 1, LARGER)  # the largest of the window, too
    first = model[0].layer if change == "adapted" else model[0]
    assert input_scale(first) == float(torch.tensor(E4M3_MAX) / largest)


def test_a_layer_in_no_optimizer_is_told_and_follows_once_it_is_frozen() -> None:
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = SGD(model[1].parameters(), 1e-9)
    with pytest.warns(UserWarning, match="the FP8 scales of 0.input, 0.weight.* are not updated"):
        train(model, optimizer, UPDATES_OF_OTHERS)
    assert input_scale(model[0]) == 0
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    assert input_scale(model[0]) > 0


def test_an_optimizer_in_the_closure_of_another_one_updates_its_own_layers() -> None:
    models = converted(nn.Linear(16, 16)), converted(nn.Linear(16, 16))
    outer, inner = (SGD(model.parameters(), 1e-9) for model in models)

    def closure() -> float:
        train(models[1], inner, 2)
        with fp8_autocast(fp8_recipe="delayed"):
            loss = models[0](torch.randn(8, 16)).square().mean()
        loss.backward()
        return loss.item()

    outer.step(closure)  # type: ignore[arg-type]
    histories = [model[0].history for model in models]
    assert all(isinstance(history, AmaxHistory) for history in histories)
    assert [history.updates for history in histories] == [1, 2]


def test_sharded_layers_keep_their_optimizer_when_another_model_is_made(one_rank: DeviceMesh) -> None:
    model = converted(Block(), Block())
    for module in (*model, model):
        fully_shard(module, mesh=one_rank)
    optimizer = SGD(model.parameters(), 1e-9)
    train(model, optimizer, 3)
    other = Linear(8, 8)  # has a history of its own
    history = model[0].q.history
    history.scale.fill_(1.0)
    train(model, optimizer, 1)
    assert bool((history.scale != 1).all())
    assert other.history is not history


def test_a_frozen_layer_leaves_an_idle_optimizer() -> None:
    """The optimizer of a first phase of training, such as that of an earlier Trainer, lives on and does not step."""
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    first = SGD(model.parameters(), 1e-9)
    train(model, first, 3)
    model[0].requires_grad_(False)
    second = SGD(model[1].parameters(), 1e-9)
    before = input_scale(model[0])
    train(model, second, IDLE_ROUNDS - 1, LARGER)
    assert input_scale(model[0]) == before, "it may step again, as that of a GAN's other network"
    largest = max(train(model, second, 1, LARGER) for _ in range(4))
    assert input_scale(model[0]) <= E4M3_MAX / largest * (1 + 1e-6)
    model[0].requires_grad_()
    with pytest.warns(UserWarning, match="the FP8 scales of 0.input, 0.weight.* are not updated"):
        train(model, second, 2 * UPDATES_OF_OTHERS)
    largest = train(model, first, 1, 100 * LARGER)
    assert input_scale(model[0]) == float(torch.tensor(E4M3_MAX) / largest), "it is active again"


def test_two_optimizers_that_take_turns_stay_active() -> None:
    """As of a GAN, one of whose networks is frozen while the other one steps."""
    model = converted(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizers = [SGD(layer.parameters(), 1e-9) for layer in model]
    for turn in range(2 * IDLE_ROUNDS):
        for own, layer in enumerate(model):
            layer.requires_grad_(own == turn % 2)
        before = [input_scale(layer) for layer in model]
        train(model, optimizers[turn % 2], 1, float(turn + 1))
        if turn > 1:
            assert input_scale(model[1 - turn % 2]) == before[1 - turn % 2]


@pytest.mark.parametrize("of", ["unpickled", "part of a copy", "part of a model", "not converted"])
def test_a_frozen_layer_whose_model_is_not_known_follows_every_optimizer(of: str) -> None:
    model = converted(Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, 16)))
    train(model, SGD([each for each in model.parameters() if each.requires_grad], 1e-9), 3)
    if of == "unpickled":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        model = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    elif of == "part of a copy":
        model = nn.Sequential(copy.deepcopy(model[0]))
    elif of == "part of a model":
        model = nn.Sequential(model[0])
    else:
        model = nn.Sequential(Adapted(Linear(16, 16)))
    gc.collect()
    largest = train(model, SGD([each for each in model.parameters() if each.requires_grad], 1e-9), 1, LARGER)
    assert input_scale(model[0].layer) == float(torch.tensor(E4M3_MAX) / largest)


def test_freezing_parameters_outside_fp8_layers_changes_owners() -> None:
    model = converted(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)))
    model[0][1].requires_grad_(False)
    optimizer = SGD(model[1].parameters(), 1e-9)
    train(model, optimizer, 3)
    assert input_scale(model[0][1]) == 0, "its block's norm has an optimizer of its own, or will have"
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    assert input_scale(model[0][1]) > 0
