"""fp8_autocast outside Lightning: nesting, calibration, updates, state, recomputation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import (
    DelayedScaling,
    Linear,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    update_fp8_scales,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Role
from lightning_fp8.ops.cast import quantize_op
from tests.op_sides import note_calls
from tests.small import mlp


def high_precision(linear: Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def step(model: nn.Module, x: Tensor, recipe: Any = "delayed", update: bool = True) -> None:
    with fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    if update:
        update_fp8_scales(model)


def test_regions_nest_and_the_innermost_rules() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    exact = high_precision(linear, x)
    with fp8_autocast(fp8_recipe="tensorwise"):
        outer = linear(x)
        with fp8_autocast(enabled=False):
            assert torch.equal(linear(x), exact)
            with fp8_autocast(fp8_recipe="mxfp8"):
                inner = linear(x)
        assert torch.equal(linear(x), outer)
    assert torch.equal(linear(x), exact)
    assert not torch.equal(outer, exact)
    assert not torch.equal(inner, outer)


def test_a_region_ends_with_an_exception() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    with pytest.raises(RuntimeError, match="inside"), fp8_autocast():
        raise RuntimeError("inside")
    assert torch.equal(linear(x), high_precision(linear, x))


def test_it_decorates_functions_and_defaults_to_delayed_scaling() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)

    @fp8_autocast()
    def forward() -> Tensor:
        return linear(x)

    assert not torch.equal(forward(), high_precision(linear, x))
    assert linear.slots[Role.INPUT].amax == x.abs().max()


def test_scales_are_updated_by_a_step_and_by_no_region() -> None:
    linear = Linear(16, 8)
    slots = linear.slots
    x = torch.randn(4, 16)
    largest = linear.weight.detach().abs().max()
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    step(linear, x, update=False)
    with torch.no_grad(), fp8_autocast():
        linear(x)
    with fp8_autocast(enabled=False):
        pass
    with fp8_autocast(), fp8_autocast():
        pass
    assert not any(slot.scale for slot in slots.values())
    optimizer.step()
    assert slots[Role.INPUT].scale == torch.tensor(448.0) / x.abs().max()
    assert slots[Role.WEIGHT].scale == torch.tensor(448.0) / largest
    assert slots[Role.GRAD_OUTPUT].scale > 0
    assert slots[Role.INPUT].history.updates == 1


def test_an_enabled_region_inside_a_disabled_one_observes_too() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    with fp8_autocast(enabled=False), fp8_autocast():
        linear(x)
    update_fp8_scales(linear)
    assert linear.slots[Role.INPUT].scale == torch.tensor(448.0) / x.abs().max()


def test_calibration_updates_no_other_model() -> None:
    linear, other, x = Linear(16, 8), Linear(16, 8), torch.randn(4, 16)
    step(other, x, update=False)
    with fp8_autocast(enabled=False, calibrating=True, fp8_recipe=DelayedScaling(amax_history_len=3)):
        linear(x)
    assert linear.slots[Role.INPUT].scale == torch.tensor(448.0) / x.abs().max()
    assert other.slots[Role.INPUT].scale == 0
    assert other.slots[Role.INPUT].amax == x.abs().max()
    assert other.history.updates == 0


def test_calibrating_collects_and_computes_in_high_precision() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    dy = torch.randn(4, 8)
    with fp8_autocast(enabled=False, calibrating=True):
        y = linear(x)
        assert torch.equal(y, high_precision(linear, x))
        y.backward(dy)
    for role, tensor, largest in (
        (Role.INPUT, x, 448),
        (Role.WEIGHT, linear.weight, 448),
        (Role.GRAD_OUTPUT, dy, 57344),
    ):
        assert linear.slots[role].scale.item() == pytest.approx((largest / tensor.abs().max()).item(), rel=1e-6)


def test_calibration_without_gradients_prepares_inference() -> None:
    linear = Linear(16, 8)
    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True):
        linear(torch.full((2, 16), 4.0))
    assert linear.slots[Role.INPUT].scale == 112
    assert linear.slots[Role.GRAD_OUTPUT].scale == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_leaves_scales_finite_and_training_recovers(bad: float) -> None:
    model = mlp(Linear)
    x, poisoned = torch.randn(8, 16), torch.randn(8, 16)
    poisoned[3, 5] = bad
    for batch in (x, poisoned, x):
        step(model, batch)
        model.zero_grad()
    with fp8_autocast():
        y = model(x)
    assert torch.isfinite(y).all()
    state = fp8_state_dict(model)
    assert torch.isfinite(state["scale"]).all()
    assert torch.isfinite(state["amax_history"]).all()
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), rtol=0.2, atol=0.1)


def test_the_first_step_may_be_the_bad_one() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    step(linear, torch.full((4, 16), math.nan))
    linear.zero_grad()
    step(linear, x)
    torch.testing.assert_close(linear.weight.grad.isfinite().all(), torch.tensor(True))


@pytest.mark.parametrize("converted", [False, True])
def test_state_goes_through_a_file_and_back(converted: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        model = mlp(nn.Linear if converted else Linear)
        return convert_module(model) if converted else model

    first, x = build(), torch.randn(8, 16)
    for _ in range(3):
        step(first, x)
    torch.save(fp8_state_dict(first), tmp_path / "fp8.pt")
    second = build()
    assert load_fp8_state_dict(second, torch.load(tmp_path / "fp8.pt", weights_only=True)) == []
    for name in ("scale", "amax_history"):
        assert torch.equal(fp8_state_dict(second)[name], fp8_state_dict(first)[name])
    assert (fp8_state_dict(first)["scale"] > 0).all()
    with torch.no_grad(), fp8_autocast():
        assert torch.equal(second(2 * x), first(2 * x))


def test_rows_a_file_does_not_hold_start_empty() -> None:
    small, large = mlp(Linear, depth=3), mlp(Linear, depth=4)
    missing = load_fp8_state_dict(large, fp8_state_dict(small))
    assert missing == [f"6.{role.value}" for role in LINEAR_ROLES]


def test_a_model_without_fp8_layers_takes_no_state() -> None:
    with pytest.raises(ValueError, match="convert_module"):
        load_fp8_state_dict(mlp(), fp8_state_dict(mlp(Linear)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_its_forward(recipe: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        torch.manual_seed(2)
        model, x = mlp(Linear), torch.randn(8, 16, requires_grad=True)
        for _ in range(3):
            model.zero_grad()
            with fp8_autocast(fp8_recipe=recipe):
                y = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
            y.square().sum().backward()
        state = fp8_state_dict(model)
        return [*(parameter.grad for parameter in model.parameters()), state["scale"], state["amax_history"]]

    assert all(torch.equal(one, two) for one, two in zip(gradients(True), gradients(False)))


def test_backward_follows_the_forwards_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    note_calls(monkeypatch, quantize_op, lambda x, cast, *others: used.append(cast.layout.value))
    linear = Linear(64, 32)
    with fp8_autocast(fp8_recipe="mxfp8"):
        y = linear(torch.randn(4, 64, requires_grad=True))
    with fp8_autocast(fp8_recipe="rowwise"):
        y.sum().backward()
    assert set(used) == {"1x32"}
    assert len(used) == 4  # x, w; dy, w again


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_enters_its_own_regions(use_reentrant: bool) -> None:
    """A layer in FP8 and in high precision, and called elsewhere before the backward pass."""
    layer, x = Linear(32, 32), torch.randn(8, 32)

    def twice(x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe="tensorwise"):
            h = layer(x)
        with fp8_autocast(enabled=False):
            return layer(h)

    def gradients(run: Any) -> tuple[Tensor | None, ...]:
        given = x.clone().requires_grad_()
        layer.zero_grad()
        y = run(given)
        with torch.no_grad():
            layer(x)
        y.backward(torch.ones_like(y))
        return given.grad, layer.weight.grad

    plain = gradients(twice)
    again = gradients(lambda x: checkpoint(twice, x, use_reentrant=use_reentrant))
    for expected, found in zip(plain, again):
        assert torch.equal(found, expected)


def test_a_hook_of_a_backward_pass_enters_its_own_region() -> None:
    layer, x = Linear(32, 32), torch.randn(8, 32)
    found: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        with torch.no_grad(), fp8_autocast(enabled=False):
            found.append(layer(x))

    with fp8_autocast(fp8_recipe="tensorwise"):
        y = layer(x)
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(found[0], layer(x))
    assert not torch.equal(found[0], y)


def test_recomputation_updates_no_scales() -> None:
    layer, x = Linear(32, 32), torch.randn(8, 32, requires_grad=True)

    def in_a_region(x: Tensor) -> Tensor:
        with fp8_autocast():
            y: Tensor = layer(x)
        return y

    checkpoint(in_a_region, x, use_reentrant=False).sum().backward()
    assert layer.history.updates == 0


def test_reduce_amax_is_a_setting_of_the_recipe() -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    recipe = DelayedScaling(reduce_amax=False, margin=1)
    step(linear, x, recipe)
    step(linear, x, recipe)
    assert linear.slots[Role.INPUT].scale == torch.tensor(224.0) / x.abs().max()
