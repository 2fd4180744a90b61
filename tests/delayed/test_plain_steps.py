"""One update of the scales for each optimizer step, in loops without Lightning."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    DelayedScaling,
    Format,
    Linear,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    update_fp8_scales,
)
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.watch import UPDATES_IN_EVAL
from tests.small import mlp, step_in_backward

WINDOW = 64


def region_step(model: nn.Module, optimizer: Optimizer, recipe: DelayedScaling, micro_batches: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(micro_batches):
        with fp8_autocast(fp8_recipe=recipe):
            y = model(torch.randn(8, 16))
        y.square().mean().backward()
    optimizer.step()


def history(model: nn.Module) -> AmaxHistory:
    (found,) = {id(m.history): m.history for m in model.modules() if isinstance(m, Linear) and m.fp8}.values()
    assert found is not None
    return found


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_models_in_alternation_count_their_own_steps(interval: int) -> None:
    recipe = DelayedScaling(amax_history_len=WINDOW, interval=interval)
    models = [convert_module(mlp()) for _ in range(2)]
    optimizers = [SGD(model.parameters(), 0.1) for model in models]
    for _ in range(7):
        for model, optimizer in zip(models, optimizers):
            region_step(model, optimizer, recipe)
    for model in models:
        found = history(model)
        assert found.updates == 7
        assert (found.amax_history[-7:] > 0).all()
        due = 7 - 7 % interval  # the last update that recomputed
        largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in found.names])
        torch.testing.assert_close(found.scale, largest / found.amax_history[: WINDOW - 7 + due].amax(0))


def test_steps_without_an_optimizer_update_when_told() -> None:
    """Of the model that is given, and of none that runs beside it."""
    recipe = DelayedScaling(amax_history_len=WINDOW, interval=2)
    models = [Linear(16, 4) for _ in range(2)]
    for step in range(4):
        for model in models:
            with fp8_autocast(fp8_recipe=recipe):
                y = model(torch.randn(8, 16))
            y.sum().backward()
        assert [history(model).updates for model in models] == [step, 0]
        assert all(slot.amax > 0 for model in models for slot in model.slots.values())
        update_fp8_scales(models[0])
    assert all(slot.scale > 0 for slot in models[0].slots.values())
    assert all(slot.scale == 0 for slot in models[1].slots.values())


def test_a_part_of_a_model_updates_alone() -> None:
    model = convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), first_last_layers_bf16=False)
    with fp8_autocast():
        y = model(torch.randn(8, 16))
    y.sum().backward()
    update_fp8_scales(model[1])
    assert (fp8_state_dict(model)["scale"] > 0).tolist() == [False] * 3 + [True] * 3
    assert (fp8_state_dict(model)["seen"] > 0).tolist() == [True] * 3 + [False] * 3


def test_micro_batches_of_a_plain_loop_are_one_step() -> None:
    recipe, model = DelayedScaling(amax_history_len=WINDOW), convert_module(mlp())
    optimizer = SGD(model.parameters(), 0.1)
    region_step(model, optimizer, recipe)
    for _ in range(4):
        region_step(model, optimizer, recipe, micro_batches=3)
    assert history(model).updates == 5
    assert (history(model).amax_history[-5:] > 0).all()
    assert not history(model).amax_history[:-5].any()


def test_closures_of_a_plain_loop_are_one_step_from_the_first_on() -> None:
    recipe, model = DelayedScaling(amax_history_len=WINDOW), convert_module(mlp())
    optimizer, calls = torch.optim.LBFGS(model.parameters(), max_iter=3), []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    assert len(calls) > 2
    assert history(model).updates == 2
    assert (history(model).amax_history[-2:] > 0).all()


@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_of_adapters_alone_steps_the_model(copied: bool) -> None:
    """Low-rank adapters train while every FP8 weight is frozen."""
    recipe, model = DelayedScaling(amax_history_len=WINDOW), mlp()
    model.append(nn.Linear(4, 4))
    convert_module(model, first_last_layers_bf16=False, skip=("7",))
    model = copy.deepcopy(model) if copied else model
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    optimizer = SGD(model[-1].parameters(), 0.1)
    for _ in range(3):
        region_step(model, optimizer, recipe, micro_batches=2)
    assert history(model).updates == 3
    assert (history(model).amax_history[-3:, 0] > 0).all()
    assert not history(model).amax_history[:-3].any()


def test_models_in_alternation_keep_their_own_recipes() -> None:
    recipes = [
        DelayedScaling(amax_history_len=16, interval=2, margin=1),
        DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3),
    ]
    start = [convert_module(mlp()) for _ in recipes]

    def train(models: list[nn.Module], recipes: list[DelayedScaling]) -> list[dict[str, Any]]:
        torch.manual_seed(4)
        optimizers = [SGD(model.parameters(), 0.1) for model in models]
        for _ in range(6):
            for model, optimizer, recipe in zip(models, optimizers, recipes):
                torch.manual_seed(5)
                region_step(model, optimizer, recipe)
        return [copy.deepcopy(fp8_state_dict(model)) for model in models]

    together = train(copy.deepcopy(start), recipes)
    for index, recipe in enumerate(recipes):
        (alone,) = train([copy.deepcopy(start[index])], [recipe])
        assert torch.equal(together[index]["scale"], alone["scale"])
        assert torch.equal(together[index]["amax_history"], alone["amax_history"])
        assert together[index]["amax_history"].shape[0] == recipe.amax_history_len


def test_scales_move_with_the_format() -> None:
    """From E5M2 to E4M3 a gradient's scale shrinks by 128, or every gradient would saturate for a step."""
    linear, x = Linear(16, 8, bias=False), torch.randn(32, 16)

    def gradient(recipe: DelayedScaling) -> Tensor:
        linear.weight.grad = None
        with fp8_autocast(fp8_recipe=recipe):
            y = linear(x)
        (y.square().sum() / 2).backward()
        assert linear.weight.grad is not None
        return linear.weight.grad

    for _ in range(3):
        gradient(DelayedScaling())
    exact = F.linear(x.double(), linear.weight.double()).T @ x.double()
    for recipe in (DelayedScaling(fp8_format=Format.E4M3), DelayedScaling(margin=4), DelayedScaling()):
        error = (gradient(recipe).double() - exact).norm() / exact.norm()
        assert error < 0.1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inner", [DelayedScaling(fp8_format=Format.E4M3), DelayedScaling(margin=5)], ids=["E4M3", "5"])
@pytest.mark.parametrize("swapped", [False, True])
def test_two_formats_and_margins_in_one_model(inner: DelayedScaling, swapped: bool, compiled: bool) -> None:
    """Backward casts a layer's gradient with its own region's format: the scale is for that, whatever ran last."""
    model = convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), first_last_layers_bf16=False)
    layers: list[Any] = [torch.compile(layer, backend="aot_eager") if compiled else layer for layer in model]
    recipes = [inner, DelayedScaling()][:: -1 if swapped else 1]
    optimizer, x = SGD(model.parameters(), 0.0), torch.randn(32, 16)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    for _ in range(4):
        optimizer.zero_grad()
        with fp8_autocast(fp8_recipe=recipes[1]):
            with fp8_autocast(fp8_recipe=recipes[0]):
                hidden = layers[0](x)
            y = layers[1](hidden)
        y.square().mean().backward()
        for parameter, reference in zip(model.parameters(), exact.parameters()):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert (parameter.grad - reference.grad).norm() < 0.15 * reference.grad.norm()
        optimizer.step()


def test_gradients_in_eval_mode_by_another_format() -> None:
    linear, x = Linear(16, 8, bias=False), torch.randn(32, 16)
    optimizer = SGD(linear.parameters(), 0.0)
    for _ in range(3):
        region_step(linear, optimizer, DelayedScaling())
    linear.eval()
    exact = torch.ones(32, 8).double() @ linear.weight.double()
    for recipe in (DelayedScaling(fp8_format=Format.E4M3), DelayedScaling(margin=3), DelayedScaling()):
        loud = x.clone().requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = linear(loud)
        (gradient,) = torch.autograd.grad(y.sum() * 0.01, loud)
        assert (gradient.double() / 0.01 - exact).norm() < 0.1 * exact.norm()


def test_an_optimizer_that_comes_to_hold_the_model_steps_it() -> None:
    """A frozen model's optimizer gets its parameters later, or the model is converted after the first step."""
    model, head = convert_module(mlp()), nn.Linear(4, 4)
    optimizer = SGD(head.parameters(), 0.1)
    with fp8_autocast():
        model(torch.randn(8, 16))
    optimizer.step()
    assert (history(model).steps, history(model).updates) == (None, 0)
    optimizer.add_param_group({"params": list(model.parameters())})
    optimizer.step()
    assert (history(model).steps, history(model).updates) == (0, 1)
    later = mlp()
    optimizer = SGD(later.parameters(), 0.1)
    optimizer.step()
    convert_module(later)
    optimizer.step()
    assert history(later).updates == 1
    twin = copy.deepcopy(later)
    optimizer.step()
    assert history(later).updates == 2
    assert (history(twin).steps, history(twin).updates) == (None, 0)


def test_an_optimizer_whose_parameters_are_replaced_steps_the_new_model() -> None:
    first, second = Linear(16, 4), Linear(16, 4)
    optimizer = SGD(first.parameters(), 0.1)
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(second.parameters())
    optimizer.step()
    assert (history(first).updates, history(second).updates) == (1, 1)


def test_a_copy_that_is_only_evaluated_scales_from_itself() -> None:
    """An average of weights that grow would keep the scales of the step at which it was made."""
    model, recipe, x = nn.Sequential(Linear(16, 16)), DelayedScaling(), torch.randn(32, 16)
    optimizer = SGD(model.parameters(), 0.0)
    for _ in range(3):
        region_step(model, optimizer, recipe)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: new)
    stored = pickle.loads(pickle.dumps(model))
    assert torch.equal(fp8_state_dict(stored)["scale"], fp8_state_dict(model)["scale"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 50
    average.update_parameters(model)
    average.eval()
    for _ in range(2):
        with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
            y = average(x)
        exact = F.linear(x.double(), average.module[0].weight.double(), average.module[0].bias.double())
        assert (y.double() - exact).norm() < 0.1 * exact.norm()
    twin = copy.deepcopy(model)
    assert history(twin).updates == 0
    optimizer = SGD(twin.parameters(), 0.0)
    for _ in range(3):
        region_step(twin, optimizer, recipe)
    assert history(twin).updates == 3
    largest = torch.tensor([448.0, 448.0, 57344.0])
    torch.testing.assert_close(history(twin).scale, largest / history(twin).amax_history.amax(0))


def test_a_model_that_ran_in_a_group_copies_and_pickles(one_rank: DeviceMesh) -> None:
    model = nn.Sequential(Linear(16, 16))
    with fp8_autocast(fp8_group=dist.new_group([0])):
        model(torch.randn(4, 16))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin[0].weight, model[0].weight)


@pytest.mark.parametrize("kind", ["eval mode", "evaluated between", "never stepped", "frozen"])
def test_training_in_eval_mode_is_told_once(kind: str) -> None:
    """But not evaluation with gradients, with steps around it or none, nor frozen layers."""
    model, recipe, x = nn.Sequential(Linear(16, 4)), DelayedScaling(), torch.randn(4, 16)
    optimizer = SGD(model.parameters(), 0.0)
    if kind != "never stepped":
        region_step(model, optimizer, recipe)
    model.requires_grad_(kind != "frozen")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * UPDATES_IN_EVAL + 2):
            model.eval()
            with fp8_autocast(fp8_recipe=recipe):
                model(x.requires_grad_()).sum().backward()
            if kind == "evaluated between":
                model.train()
                with fp8_autocast(fp8_recipe=recipe):
                    model(x).sum().backward()
            if kind != "never stepped":
                optimizer.step()
    told = [str(warning.message) for warning in caught if "eval mode" in str(warning.message)]
    assert len(told) == (kind == "eval mode")


def test_calibration_waits_for_no_optimizer() -> None:
    recipe, model = DelayedScaling(amax_history_len=1), convert_module(mlp())
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(2):
        region_step(model, optimizer, recipe)
    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe):
        model(loud := torch.full((8, 16), 1000.0))
    with torch.no_grad():
        hidden = model[:2](loud)
    assert history(model).scale[0] == 448 / hidden.abs().max()


def test_optimizers_inside_the_backward_pass_are_one_step() -> None:
    recipe, plain = DelayedScaling(amax_history_len=WINDOW), convert_module(mlp())
    step_in_backward(plain)
    for _ in range(5):
        with fp8_autocast(fp8_recipe=recipe):
            y = plain(torch.randn(8, 16))
        y.square().mean().backward()
    assert history(plain).updates == 5
    assert (history(plain).amax_history[-5:] > 0).all()


@pytest.mark.parametrize("all_inside", [False, True])
def test_scales_stand_until_the_outermost_backward_pass_ends(all_inside: bool) -> None:
    """Reentrant checkpointing runs a backward pass for each block inside the model's."""
    model = nn.Sequential(*(Linear(16, 16) for _ in range(3)))
    step_in_backward(model)
    head = nn.Linear(16, 1).requires_grad_(not all_inside)
    step_in_backward(head if not all_inside else nn.Linear(1, 1))
    x = torch.randn(8, 16).requires_grad_()
    scales: list[Tensor] = []
    for layer in model:
        layer.register_full_backward_hook(lambda *_: scales.append(fp8_state_dict(model)["scale"].clone()))
    for step in range(3):
        with fp8_autocast():
            y = x
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=True)
            before = fp8_state_dict(model)["scale"].clone()
            loss = head(y).sum()
        loss.backward()
        assert all(torch.equal(amid, before) for amid in scales), step
        assert len(scales) == 3
        scales.clear()
    with fp8_autocast():
        assert {layer.history.updates for layer in model} == {3}
