"""``delay_wgrad_compute`` and ``backward_dw()``: the gradients of a layer that computes them at once, later."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, fp8_autocast

KINDS = pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "delayed", None])


def region(recipe: str | None) -> Any:
    return nullcontext() if recipe is None else fp8_autocast(fp8_recipe=recipe)


def pair(kind: Any, **options: Any) -> tuple[Any, Any]:
    """A layer that delays, and one that does not, of the same parameters."""
    delaying, at_once = (kind(16, 16, delay_wgrad_compute=delays, **options) for delays in (True, False))
    at_once.load_state_dict(delaying.state_dict())
    return delaying, at_once


def run(layer: Any, x: Tensor, recipe: str | None) -> Tensor:
    with region(recipe):
        output: Tensor = layer(x)
    return output


@KINDS
@RECIPES
def test_gradients_come_later_and_are_the_same(kind: Any, recipe: str | None) -> None:
    delaying, at_once = pair(kind)
    weights = [name for name, value in delaying.named_parameters() if value.dim() == 2]
    inputs = [torch.randn(4, 16, requires_grad=True) for _ in range(2)]
    for layer in (delaying, at_once):
        outputs = [run(layer, x, recipe) for x in inputs]
        for output in outputs:
            output.square().sum().backward()
    assert all(delaying.get_parameter(name).grad is None for name in weights)
    calls: list[int] = []
    delaying.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    delaying.backward_dw()
    delaying.backward_dw()
    assert (delaying.need_backward_dw(), at_once.need_backward_dw(), len(calls)) == (True, False, 2)
    for name, value in delaying.named_parameters():
        torch.testing.assert_close(value.grad, at_once.get_parameter(name).grad, msg=name)
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) has no backward pass to complete"):
        delaying.backward_dw()
    at_once.backward_dw()  # without effect


@KINDS
@RECIPES
def test_main_grad_waits(kind: Any, recipe: str | None) -> None:
    delaying, at_once = pair(kind, fuse_wgrad_accumulation=True)
    x = torch.randn(4, 16)
    found = []
    for layer in (delaying, at_once):
        weights = [value for value in layer.parameters() if value.dim() == 2]
        for weight in weights:
            weight.main_grad = torch.full((16, 16), 7.0)
            weight.grad_added_to_main_grad = False
        run(layer, x, recipe).square().sum().backward()
        assert all(weight.grad_added_to_main_grad and weight.grad is not None for weight in weights)
        found.append([weight.main_grad for weight in weights])
    assert all(bool((main_grad == 7.0).all()) for main_grad in found[0])
    delaying.backward_dw()
    assert all(map(torch.equal, *found))


def test_weights_in_parts() -> None:
    delaying, at_once = pair(Linear, parameters_split=("query", "key"))
    x = torch.randn(4, 16)
    for layer in (delaying, at_once):
        run(layer, x, "tensorwise").square().sum().backward()
    delaying.backward_dw()
    assert torch.equal(delaying.key_weight.grad, at_once.key_weight.grad)


def test_frozen_weights_copies_and_what_is_refused() -> None:
    delaying, _ = pair(Linear)
    delaying.weight.requires_grad_(False)
    run(copy.deepcopy(delaying), torch.randn(4, 16, requires_grad=True), "tensorwise").sum().backward()
    delaying.backward_dw()
    with pytest.raises(NotImplementedError, match="modules of several layers do not"):
        MultiheadAttention(32, 4, delay_wgrad_compute=True)
    compiled = torch.compile(pair(Linear)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="torch.compile does not support delay_wgrad_compute=True"):
        run(compiled, torch.randn(4, 16), "tensorwise")


@RECIPES
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_one_of_several_parts_is_frozen(kind: Any, recipe: str | None) -> None:
    delaying, at_once = (
        kind(16, 32, parameters_split=("a", "b"), delay_wgrad_compute=delays) for delays in (True, False)
    )
    at_once.load_state_dict(delaying.state_dict())
    x = torch.randn(8, 16)
    for layer in (delaying, at_once):
        layer.a_weight.requires_grad_(False)
        run(layer, x, recipe).square().sum().backward()
    delaying.backward_dw()
    assert delaying.a_weight.grad is at_once.a_weight.grad is None
    assert torch.equal(delaying.b_weight.grad, at_once.b_weight.grad)


@RECIPES
@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
def test_one_of_two_products_is_frozen(frozen: str, recipe: str | None) -> None:
    delaying, at_once = pair(LayerNormMLP)
    x = torch.randn(8, 16)
    for layer in (delaying, at_once):
        getattr(layer, frozen).requires_grad_(False)
        run(layer, x, recipe).square().sum().backward()
    delaying.backward_dw()
    for name in ("fc1_weight", "fc2_weight"):
        later, now = getattr(delaying, name).grad, getattr(at_once, name).grad
        assert (later is None) == (now is None) == (name == frozen)
        assert later is None or torch.equal(later, now)
    with pytest.raises(RuntimeError, match="no backward pass to complete"):
        delaying.backward_dw()
