"""Public functions give the same wherever they are called: in inference mode, with a default device, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_fp8 as fp8
from lightning_fp8.numerics.recipes import RECIPES
from tests.small import default_device, mlp

RECIPE = fp8.DelayedScaling(amax_history_len=4)
X = torch.linspace(-2, 2, 8 * 16).view(8, 16)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return mlp()


def trained(net: nn.Module, recipe: Any = RECIPE, steps: int = 3) -> nn.Module:
    """Gradients of ``steps`` steps add up."""
    for step in range(steps):
        with fp8.fp8_autocast(fp8_recipe=recipe):
            y = net(X * (1 + step))
        y.square().sum().backward()
        fp8.update_fp8_scales(net)
    return net


def in_a_thread(action: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    (result,) = results
    return result


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[[], Any]], Any]:
    def run(action: Callable[[], Any]) -> Any:
        with context():
            return action()

    return run


@contextmanager
def enable_grad_in_no_grad() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


GRADIENTS = {
    "torch.device": within(lambda: torch.device("meta")),
    "set_default_device": within(lambda: default_device("meta")),
    "a thread": in_a_thread,
    "enable_grad in no_grad": within(enable_grad_in_no_grad),
}
"""Ways to call something; these record gradients. Whatever nothing may depend on belongs here."""
CONTEXTS = {**GRADIENTS, "inference_mode": within(torch.inference_mode), "no_grad": within(torch.no_grad)}


def convert(net: nn.Module) -> nn.Module:
    return fp8.convert_module(net)


def convert_by_plugin(net: nn.Module) -> nn.Module:
    return fp8.FP8FabricPrecision(RECIPE, weights_dtype=torch.float32).convert_module(net)


def save_and_load(net: nn.Module) -> nn.Module:
    fp8.load_fp8_state_dict(fp8.convert_module(net), fp8.fp8_state_dict(net))
    return net


def save_and_load_by_plugin(net: nn.Module) -> nn.Module:
    plugin = fp8.FP8FabricPrecision(RECIPE, weights_dtype=torch.float32)
    plugin.convert_module(net)
    plugin.load_state_dict(plugin.state_dict())
    plugin.update_scales()
    return net


def through_transformer_engine(net: nn.Module) -> nn.Module:
    fp8.convert_module(net)
    for version in ("1.6", "2.4"):
        fp8.load_te_state_dict(net, fp8.export_te_state_dict(net, version))
    return net


def evaluate(net: nn.Module) -> nn.Module:
    with fp8.fp8_autocast(fp8_recipe=RECIPE):
        fp8.convert_module(net)(X)
    return net


def move(net: nn.Module) -> nn.Module:
    return fp8.convert_module(net).to("cpu")


ACTIONS = {
    action.__name__: action
    for action in (
        convert,
        convert_by_plugin,
        save_and_load,
        save_and_load_by_plugin,
        through_transformer_engine,
        evaluate,
        move,
    )
}


def outcome(net: nn.Module) -> list[Tensor]:
    """The state, gradients and scales of three steps more."""
    state = fp8.fp8_state_dict(net)
    trained(net)
    gradients = [parameter.grad for parameter in net.parameters()]
    return [state["scale"], state["amax_history"], *gradients, fp8.fp8_state_dict(net)["scale"]]  # type: ignore[list-item]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_training_goes_on_as_if_called_outside(action: str, context: str) -> None:
    expected, net = outcome(ACTIONS[action](model())), model()
    CONTEXTS[context](lambda: ACTIONS[action](net))
    found = outcome(net)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert {(tensor.device.type, tensor.is_inference()) for tensor in found} == {("cpu", False)}


@pytest.mark.parametrize("context", GRADIENTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_same_inside(recipe: str, context: str) -> None:
    expected, net = outcome(trained(fp8.convert_module(model()), recipe)), fp8.convert_module(model())
    GRADIENTS[context](lambda: trained(net, recipe))
    assert all(torch.equal(*pair) for pair in zip(outcome(net), expected, strict=True))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_state_that_was_saved_there_loads_anywhere(context: str) -> None:
    net = trained(fp8.convert_module(model()))
    scales = []
    for state in (fp8.fp8_state_dict(net), CONTEXTS[context](lambda: fp8.fp8_state_dict(net))):
        fresh = fp8.convert_module(model())
        fp8.load_fp8_state_dict(fresh, state)
        scales.append(fp8.fp8_state_dict(trained(fresh))["scale"])
    assert torch.equal(*scales)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("norm", [fp8.LayerNorm, fp8.RMSNorm])
def test_norms_there(norm: Any, context: str) -> None:
    made = norm(16, zero_centered_gamma=True)
    assert torch.equal(CONTEXTS[context](lambda: made(X)), made(X))


def test_a_model_that_is_made_and_converted_on_meta_trains_once_it_has_values() -> None:
    with torch.device("meta"):
        net = fp8.convert_module(model())
        alone = fp8.Linear(16, 16)
    state = model().state_dict()
    net.to_empty(device="cpu").load_state_dict(state)
    alone.to_empty(device="cpu").load_state_dict({"weight": state["2.weight"][:16, :16], "bias": state["2.bias"][:16]})
    assert all(torch.equal(*pair) for pair in zip(outcome(net), outcome(fp8.convert_module(model())), strict=True))
    trained(alone)
    assert (fp8.fp8_state_dict(alone)["scale"] > 0).all()
