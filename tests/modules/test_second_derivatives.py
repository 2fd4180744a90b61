"""Gradients of gradients through FP8 layers, against float64.

Integers up to 7 are exact in both formats, and 7 as the amax of everything that shares a scale makes every scale a
power of two: where all that is cast holds such integers, FP8 rounds nothing and derivatives of any order are
float64's, bit for bit.
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import Linear, fp8_autocast
from lightning_fp8.recipes import RECIPES, make_recipe
from lightning_fp8.scaled import Role
from tests.small import update_all_scales

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """torch warns where a gradient passes an op that has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def integers(rows: int, columns: int) -> Tensor:
    """From -7 to 7, with a 7 in every row and column and every block of them."""
    values = torch.randint(-7, 8, (rows, columns)).float()
    size = max(rows, columns)
    index = torch.arange(size)
    values[index % rows, index % columns] = 7.0
    return values


def exact_layer(recipe: str, bias: bool = True, **options: Any) -> Linear:
    linear = Linear(24, 20, bias=bias, **options)
    with torch.no_grad():
        for parameter, value in zip(linear.parameters(), (integers(20, 24), integers(1, 20)[0])):
            parameter.copy_(value)
    return linear


def in_float64(model: nn.Module) -> nn.Module:
    """The same with torch's own layers."""
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if isinstance(module, Linear):
            module.__class__ = nn.Linear
    return twin


def derivatives(
    model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor], order: int
) -> list[Tensor]:
    """Every first derivative of ``(y * v).sum()``, weighted, added up and derived again, as often as ``order`` says."""
    v, x = weights[0].clone().requires_grad_(), x.clone().requires_grad_(x.requires_grad)
    into = [tensor for tensor in (v, x, *model.parameters()) if tensor.requires_grad]
    results: list[Tensor] = []
    value: Any = (run(x) * v).sum()
    for _ in range(order):
        found = grad(value, into, create_graph=True, allow_unused=True, materialize_grads=True)
        results += found
        value = sum((g * w.expand_as(g)).sum() for g, w in zip(found, weights))
    return [result.detach() for result in results]


def both(
    recipe: str, linear: Linear, x: Tensor, order: int, run: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Our derivatives, each beside float64's."""

    def in_fp8(x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe=recipe):
            return (run or linear)(x)  # type: ignore[return-value]

    y = torch.empty(*x.shape[:-1], 20)
    tensors = [tensor for tensor in (y, x, *linear.parameters()) if tensor is y or tensor.requires_grad]
    weights = [integers(t.numel() // t.shape[-1], t.shape[-1]).view(t.shape).to(x.dtype) for t in tensors]
    found = derivatives(linear, in_fp8, x, weights, order)
    twin = in_float64(linear)
    x64 = x.detach().double().requires_grad_(x.requires_grad)
    exact = derivatives(twin, twin, x64, [weight.double() for weight in weights], order)
    assert len(found) == len(exact) == order * len(tensors)
    assert all(bool(e.abs().max() > 0) for e in exact[: len(tensors)])
    assert any(bool(e.abs().max() > 0) for e in exact[-len(tensors) :])
    return zip(found, exact)


@RECIPE
@pytest.mark.parametrize("bias", [True, False])
def test_derivatives_of_every_order_are_exact_where_casts_are(recipe: str, bias: bool) -> None:
    x = integers(16, 24).requires_grad_()
    for ours, exact in both(recipe, exact_layer(recipe, bias), x, order=3):
        assert torch.equal(ours.double(), exact)


@RECIPE
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_has_no_part_in_second_derivatives(recipe: str, frozen: str) -> None:
    linear, x = exact_layer(recipe), integers(16, 24).requires_grad_(frozen != "input")
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(name != frozen)
    for ours, exact in both(recipe, linear, x, order=2):
        assert torch.equal(ours.double(), exact)


@RECIPE
@pytest.mark.parametrize("kind", ["leading dimensions", "micro-batch", "checkpoint"])
def test_second_derivatives_are_exact_however_the_layer_is_called(recipe: str, kind: str) -> None:
    linear, x = exact_layer(recipe), integers(16, 24)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "leading dimensions": linear,
        "micro-batch": lambda x: linear(x, is_first_microbatch=True),
        "checkpoint": lambda x: checkpoint(linear, x, use_reentrant=False),
    }
    x = (x.view(2, 8, 24) if kind == "leading dimensions" else x).requires_grad_()
    for ours, exact in both(recipe, linear, x, 2, calls[kind]):
        assert torch.equal(ours.double(), exact)


@RECIPE
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_round_to_bfloat16_as_the_layer_does(recipe: str, weights_dtype: torch.dtype) -> None:
    linear = exact_layer(recipe, params_dtype=weights_dtype)
    x = integers(16, 24).to(weights_dtype).requires_grad_()

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=weights_dtype == torch.float32):
            return linear(x)

    for ours, exact in both(recipe, linear, x, 2, run):
        # Sums of rounded terms are off by roundings of the largest.
        torch.testing.assert_close(ours.double(), exact, rtol=0.0, atol=2.0**-7 * float(exact.abs().max()))


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@RECIPE
def test_a_gradient_penalty_trains_as_in_float64(recipe: str) -> None:
    """Of a critic of three layers: every parameter's gradient.

    The second derivative itself rounds nothing; the first one's rounding error is what one backward has, about 5 % of
    E5M2 gradients for each of three layers, and the penalty's is the same again.
    """
    model = nn.Sequential(Linear(32, 48), nn.Tanh(), Linear(48, 32), nn.Softplus(), Linear(32, 1))
    twin, x = in_float64(model), torch.randn(64, 32)

    def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = model(x)
        (dx,) = grad(y.sum(), x, create_graph=True)
        loss = y.mean() + ((dx.norm(dim=1) - 1) ** 2).mean() + model[2].weight.square().sum() / 99
        return grad(loss, [x, *model.parameters()])

    for _ in range(2):  # by the tensors' own scales, then, with delayed scaling, by the last step's
        found = gradients(model, x)
        update_all_scales(make_recipe("delayed"))  # type: ignore[arg-type]
        for ours, exact in zip(found, gradients(twin, x.double())):
            assert distance(ours, exact) < 0.15


@RECIPE
def test_hessian_vector_products_and_hessians(recipe: str) -> None:
    """Of a loss in all parameters: the products pass every layer's second pass, its dx's and its dw's derivatives."""
    model = nn.Sequential(Linear(16, 16), nn.Tanh(), Linear(16, 8))
    twin, x = in_float64(model), torch.randn(32, 16)
    names, parameters = zip(*((name, p.detach().clone()) for name, p in model.named_parameters()))
    direction = tuple(torch.randn_like(p) for p in parameters)

    def loss_of(model: nn.Module, x: Tensor) -> Callable[..., Tensor]:
        def loss(*values: Tensor) -> Tensor:
            with fp8_autocast(fp8_recipe=recipe):
                return torch.func.functional_call(model, dict(zip(names, values)), (x,)).square().mean()

        return loss

    _, found = torch.autograd.functional.hvp(loss_of(model, x), parameters, direction)
    in_64 = tuple(p.double() for p in parameters), tuple(d.double() for d in direction)
    _, exact = torch.autograd.functional.hvp(loss_of(twin, x.double()), *in_64)
    for ours, theirs in zip(found, exact):
        assert distance(ours, theirs) < 0.1


@RECIPE
def test_a_hessian_of_input_and_weight_is_exact_where_casts_are(recipe: str) -> None:
    linear, t = Linear(8, 8, bias=False), integers(4, 8)
    twin, x, weight = in_float64(linear), integers(4, 8), integers(8, 8)

    def loss_of(model: nn.Module, t: Tensor) -> Callable[..., Tensor]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            with fp8_autocast(fp8_recipe=recipe):
                return (torch.func.functional_call(model, {"weight": weight}, (x,)) * t).sum()

        return loss

    found = torch.autograd.functional.hessian(loss_of(linear, t), (x, weight))
    exact = torch.autograd.functional.hessian(loss_of(twin, t.double()), (x.double(), weight.double()))
    assert exact[0][1].abs().max() == 7
    for ours, theirs in zip(found, exact):
        assert all(torch.equal(a.double(), b) for a, b in zip(ours, theirs))


def test_what_goes_into_main_grad_cannot_be_derived_again() -> None:
    linear = Linear(16, 8, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.zeros(8, 16)  # type: ignore[assignment]
    x = torch.randn(4, 16, requires_grad=True)
    with fp8_autocast():
        y = linear(x)
    with pytest.raises(RuntimeError, match="create_graph=True.*main_grad.*fuse_wgrad_accumulation=False"):
        grad(y.sum(), x, create_graph=True)


def test_calibration_observes_and_leaves_second_derivatives_alone() -> None:
    linear, x = exact_layer("delayed"), integers(16, 24).requires_grad_()

    def run(x: Tensor) -> Any:
        with fp8_autocast(enabled=False, calibrating=True):
            return linear(x)

    for ours, exact in both("delayed", linear, x, 3, run):
        assert torch.equal(ours.double(), exact)
    assert linear.slots is not None
    assert [float(linear.slots[role].amax) for role in linear.roles[:2]] == [7.0, 7.0]
    assert linear.slots[Role.GRAD_OUTPUT].amax >= 7.0
    assert not linear.slots[Role.GRAD_OUTPUT].amax.requires_grad


def test_an_ordinary_backward_leaves_no_graph() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    with fp8_autocast():
        y = linear(x)
    y.square().sum().backward()
    assert not any(tensor.grad.requires_grad for tensor in (x, *linear.parameters()))


def penalty(recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """``x``, ``y``, and a function of the gradients of a layer's output."""
    torch.manual_seed(0)
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x * 1)
    dx, dw = grad(y.square().sum(), (x, linear.weight), create_graph=True)
    return x, y, dx.square().sum() + dw.square().sum()


@pytest.mark.parametrize("way", ["stops at y", "raises at y", "stops at y, with a graph"])
def test_a_pass_that_does_not_reach_the_input_leaves_nothing_behind(way: str) -> None:
    x, y, value = penalty("tensorwise")
    (expected,) = grad(value, x, retain_graph=True)
    if way == "raises at y":

        def fail(_: Tensor) -> None:
            raise ArithmeticError

        handle = y.register_hook(fail)
        with pytest.raises(ArithmeticError):
            grad(value, x, retain_graph=True)
        handle.remove()
    else:
        grad(value, y, retain_graph=True, create_graph="graph" in way)
    assert torch.equal(grad(value, x, retain_graph=True)[0], expected)


def test_two_passes_with_a_graph_add_up_in_a_third() -> None:
    linear, x = exact_layer("tensorwise"), integers(16, 24).requires_grad_()
    exact_linear, exact_x = in_float64(linear), x.detach().double().requires_grad_()

    def thrice(layer: nn.Module, x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe="tensorwise"):
            y = layer(x)
        dw = [grad(y, layer.weight, dy, create_graph=True)[0] for dy in (torch.ones_like(y), -3 * torch.ones_like(y))]
        return grad(dw[0].sum() + (2 * dw[1]).sum(), x)[0]

    assert torch.equal(thrice(linear, x).double(), thrice(exact_linear, exact_x))


def test_threads_derive_one_graph_at_once() -> None:
    x, _, value = penalty("delayed")
    (expected,) = grad(value, x, retain_graph=True)
    wrong: list[Tensor] = []

    def run() -> None:
        for _ in range(20):
            (found,) = grad(value, x, retain_graph=True)
            if not torch.equal(found, expected):
                wrong.append(found)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_anomaly_mode_looks_through_second_derivatives() -> None:
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        x, _, value = penalty("tensorwise")
        assert grad(value, x)[0].isfinite().all()


@RECIPE
def test_a_layer_keeps_the_place_of_its_input_and_not_the_input(recipe: str) -> None:
    linear, leaf = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    x = leaf * 1
    gone = weakref.ref(x.untyped_storage())
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x)
    del x
    assert gone() is None
    assert len(grad(y.sum(), leaf)) == 1
