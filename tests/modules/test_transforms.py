"""FP8 layers under torch.func: functional_call is right, transforms are refused with a way out that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from lightning_fp8 import Linear, convert_module, fp8_autocast, ops
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Cast, Layout
from tests.small import mlp

X = torch.linspace(-2, 2, 8 * 16).view(8, 16)
ONE = torch.ones(())
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def model() -> nn.Module:
    torch.manual_seed(1)
    return convert_module(mlp())


def loss(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return net(x).square().sum()


@EACH_RECIPE
def test_functional_call_is_a_call(recipe: str) -> None:
    """With another model's parameters: its results and gradients, to the bit."""
    net, other = model(), model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    with fp8_autocast(fp8_recipe=recipe):
        loss(other, X).backward()
        loss(lambda x: functional_call(net, given, (x,)), X).backward()
    for name, parameter in other.named_parameters():
        assert torch.equal(given[name].grad, parameter.grad)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in net.parameters())


def dual(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        return net(forward_ad.make_dual(X, X))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda net: torch.vmap(net)(X.view(2, 4, 16)),
    "vmap without gradients": lambda net: torch.no_grad()(torch.vmap(net))(X.view(2, 4, 16)),
    "grad": lambda net: torch.func.grad(lambda x: loss(net, x))(X),
    "grad of parameters": lambda net: torch.func.grad(
        lambda given: loss(lambda x: functional_call(net, given, (x,)), X)
    )(dict(net.named_parameters())),
    "vjp": lambda net: torch.func.vjp(net, X),
    "jvp": lambda net: torch.func.jvp(net, (X,), (X,)),
    "jacrev": lambda net: torch.func.jacrev(net)(X),
    "jacfwd": lambda net: torch.func.jacfwd(net)(X),
    "hessian": lambda net: torch.func.hessian(lambda x: loss(net, x))(X),
    "a dual number": dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("setting", [{"fp8_recipe": "delayed"}, {"fp8_recipe": "mxfp8"}, {"calibrating": True}])
def test_a_transform_is_refused_and_runs_in_high_precision(transform: str, setting: dict[str, Any]) -> None:
    net = model()
    with fp8_autocast(**{"enabled": "calibrating" not in setting, **setting}):
        with pytest.raises(RuntimeError, match=r"^Linear .*fp8_autocast\(enabled=False\)"):
            TRANSFORMS[transform](net)
        with fp8_autocast(enabled=False):
            TRANSFORMS[transform](net)


def test_only_what_carries_a_tangent_is_refused() -> None:
    net = model()
    with fp8_autocast(fp8_recipe="rowwise"), forward_ad.dual_level():
        inside = net(X)
    with fp8_autocast(fp8_recipe="rowwise"):
        assert torch.equal(net(X), inside)


def test_batched_gradients_are_refused_and_come_one_at_a_time() -> None:
    net, x = model(), X.clone().requires_grad_()
    with fp8_autocast(fp8_recipe="rowwise"):
        y = net(x)
    each = torch.eye(y.numel()).view(-1, *y.shape)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.*one at a time"):
        torch.autograd.grad(y, x, each, is_grads_batched=True, retain_graph=True)
    expected = torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in each])
    with fp8_autocast(fp8_recipe="rowwise"):
        jacobian = torch.autograd.functional.jacobian(net, X)
    assert torch.equal(jacobian.view(expected.shape), expected)


def test_ops_are_refused_under_vmap() -> None:
    cast = Cast(E4M3, Layout.TENSOR)
    with pytest.raises(RuntimeError, match="FP8 ops do not run under vmap"):
        torch.vmap(lambda x: ops.quantize(x, cast, scale=ONE, amax=ONE.clone()))(X.view(2, 4, 16))
    with pytest.raises(RuntimeError, match="FP8 ops do not run under vmap"):
        torch.vmap(lambda x: ops.observe(x, torch.zeros(())))(X.view(2, 4, 16))


def test_a_layer_outside_fp8_is_torchs_under_a_transform() -> None:
    layer = Linear(16, 4)
    plain = nn.Linear(16, 4)
    plain.load_state_dict(layer.state_dict())
    both = [torch.func.jacrev(net)(X) for net in (layer, plain)]
    assert torch.equal(*both)
