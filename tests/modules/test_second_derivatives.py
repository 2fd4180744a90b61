"""Gradients of gradients: refused through layers that run in FP8, and torch's own where they do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DelayedScaling, Float8CurrentScaling, Linear, convert_module, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Role

SAYS = r"create_graph=True cannot derive a Linear's gradients in FP8.*fp8_autocast\(enabled=False\).*skip"


def refuses(y: Tensor, of: Tensor) -> None:
    with pytest.raises(RuntimeError, match=SAYS):
        grad(y.square().sum(), of, create_graph=True, retain_graph=True)


@pytest.mark.parametrize("recipe", [*RECIPES, Float8CurrentScaling(backward_override="high_precision")])
@pytest.mark.parametrize("frozen", [None, "weight", "input"])
def test_a_layer_refuses_and_leaves_its_graph_and_amaxes_alone(recipe: Any, frozen: str | None) -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=frozen != "input")
    linear.weight.requires_grad_(frozen != "weight")
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x)
    slot = None if linear.slots is None else linear.slots.get(Role.GRAD_OUTPUT)
    seen = None if slot is None else slot.amax.clone()
    refuses(y, linear.weight if frozen == "input" else x)
    if slot is not None and seen is not None:
        assert torch.equal(slot.amax, seen)
    y.square().sum().backward()  # the graph is there for an ordinary pass, which leaves none behind
    found = [tensor.grad for tensor in (x, *linear.parameters()) if tensor.requires_grad]
    assert all(each is not None and bool(each.any()) and not each.requires_grad for each in found)


@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}])
def test_gradients_that_go_elsewhere_are_refused_before_they_go(options: dict[str, bool]) -> None:
    linear, x = Linear(16, 8, **options), torch.randn(4, 16, requires_grad=True)  # type: ignore[arg-type]
    linear.weight.main_grad = torch.zeros(8, 16)  # type: ignore[assignment]
    with fp8_autocast(fp8_recipe="tensorwise"):
        y = linear(x)
    refuses(y, x)
    assert not linear.weight.main_grad.any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_with_gradients_is_no_second_derivative(use_reentrant: bool) -> None:
    """A backward pass that recomputes enables gradients meanwhile."""
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    found = []
    for checkpointed in (False, True):
        with fp8_autocast(fp8_recipe="tensorwise"):
            y: Tensor = checkpoint(linear, x, use_reentrant=use_reentrant) if checkpointed else linear(x)
        y.square().sum().backward()
        found.append([tensor.grad for tensor in (x, *linear.parameters())])
        x.grad = None
        linear.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found))  # type: ignore[arg-type]


def penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a gradient penalty, of the input and of every parameter."""
    x = x.clone().requires_grad_()
    (dx,) = grad(model(x).sum(), x, create_graph=True)
    return grad(((dx.norm(dim=1) - 1) ** 2).mean(), [x, *model.parameters()], allow_unused=True, materialize_grads=True)


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Softplus(), nn.Linear(32, 16))


@pytest.mark.filterwarnings("ignore:no layer of the model runs in FP8", "ignore:fp8_autocast ran nothing in FP8")
@pytest.mark.parametrize("way", ["fp8_autocast(enabled=False)", "skip"])
def test_the_ways_out_that_the_sentence_names_give_torchs_own(way: str) -> None:
    model, x = critic(), torch.randn(8, 32)
    twin = copy.deepcopy(model)
    convert_module(model, first_last_layers_bf16=False, skip=["*"] if way == "skip" else [])
    with fp8_autocast(fp8_recipe="tensorwise"):
        if way == "skip":
            found = penalty(model, x)
        else:
            with pytest.raises(RuntimeError, match=SAYS):
                penalty(model, x)
            with fp8_autocast(enabled=False):
                found = penalty(model, x)
    for ours, exact in zip(found, penalty(twin.double(), x.double())):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)


def test_calibration_observes_and_leaves_second_derivatives_alone() -> None:
    linear, x = Linear(24, 20), torch.randn(16, 24)
    twin = nn.Linear(24, 20).double()
    twin.load_state_dict(linear.state_dict())
    with fp8_autocast(enabled=False, calibrating=True, fp8_recipe=DelayedScaling()):
        found = penalty(nn.Sequential(linear, nn.Tanh()), x)
        assert linear.slots is not None
        amaxes = [linear.slots[role].amax.clone() for role in linear.roles]
    for ours, exact in zip(found, penalty(nn.Sequential(twin, nn.Tanh()), x.double())):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)
    assert amaxes[:2] == [x.abs().max(), linear.weight.abs().max()]
    assert amaxes[2] > 0
    assert not amaxes[2].requires_grad
