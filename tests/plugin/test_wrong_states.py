"""Saved FP8 state of whatever kind is refused whole, taken whole, or said to be of another run."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Format,
    FP8FabricPrecision,
    Linear,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
    update_fp8_scales,
)
from lightning_fp8.plugin import fabric
from tests.plugin.test_hostile_values import HOSTILE
from tests.small import mlp


def trained(steps: int = 3) -> nn.Module:
    net = convert_module(mlp())
    for _ in range(steps):
        with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            y = net(torch.randn(4, 16))
        y.sum().backward()
        update_fp8_scales(net)
    return net


def wrong_tensors(*shape: int) -> list[Any]:
    fitting = torch.ones(shape)
    return [
        fitting.double(), fitting.to("meta"), fitting.to_sparse(), fitting * torch.nan, fitting * torch.inf, -fitting,
        fitting[..., 1:], fitting[None, None], fitting.tolist(), torch.ones(()),
    ]  # fmt: skip


WRONG: dict[str, list[Any]] = {
    "names": [["a"] * 6, [str(index) for index in range(6)], ["2.input"], tuple("abcdef")],
    "scale": wrong_tensors(6),
    "amax_history": wrong_tensors(4, 6),
    "updates": [True, 1.0],
    "version": [True, 0, 1.0],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_entry_is_refused_and_nothing_changes(key: str) -> None:
    net = trained()
    before = fp8_state_dict(net)
    counts = [value for value in HOSTILE if key == "updates" and type(value) is int and value >= 0]
    counts += [value for value in HOSTILE if key == "version" and type(value) is int and value == 1]
    for value in [*WRONG[key], *HOSTILE]:
        if any(value is each for each in counts):
            continue
        with pytest.raises(ValueError, match="^FP8 state's|^no name in the state"):
            load_fp8_state_dict(net, {**before, key: value})
        after = fp8_state_dict(net)
        assert after["names"] == before["names"]
        assert all(torch.equal(after[name], before[name]) for name in ("scale", "amax_history"))


def test_states_say_their_version_and_newer_ones_are_refused() -> None:
    net = trained()
    state = fp8_state_dict(net)
    plugin = FP8FabricPrecision()
    plugin.convert_module(net)
    assert state["version"] == plugin.state_dict()["model"]["version"] == 1
    load_fp8_state_dict(net, {key: value for key, value in state.items() if key != "version"})  # of before it had one
    assert torch.equal(fp8_state_dict(net)["scale"], state["scale"])
    for load in (lambda newer: load_fp8_state_dict(net, newer), lambda newer: plugin.load_state_dict({"model": newer})):
        with pytest.raises(ValueError, match="'version' is 2, but this lightning_fp8 reads versions up to 1"):
            load({"version": 2, "tensors": {}})
    assert torch.equal(fp8_state_dict(net)["scale"], state["scale"])


def test_a_state_that_requires_gradients_gives_none_to_the_scales() -> None:
    net = trained()
    state = fp8_state_dict(net)
    load_fp8_state_dict(net, {**state, "scale": state["scale"].clone().requires_grad_()})
    assert isinstance(net[2], Linear)
    assert net[2].history is not None
    assert not net[2].history.scale.requires_grad


def plugin_with(*models: nn.Module, recipe: Any = "delayed") -> FP8FabricPrecision:
    plugin = FP8FabricPrecision(recipe, weights_dtype=torch.float32)
    for model in models:
        plugin.convert_module(model)
    plugin.models = models  # type: ignore[attr-defined]  # what is gone is not saved
    return plugin


def test_the_state_of_a_model_that_comes_later_waits_for_it() -> None:
    saved = plugin_with(trained(), trained(4)).state_dict()
    first, second = mlp(), mlp()
    plugin = plugin_with(first)
    plugin.load_state_dict(saved)
    plugin.convert_module(second)
    for model, name in ((first, "model"), (second, "model_1")):
        assert torch.equal(fp8_state_dict(model)["scale"], saved[name]["scale"])
        assert (saved[name]["scale"] > 0).all()


def test_models_that_are_gone_are_not_saved_for_another() -> None:
    plugin, gone = FP8FabricPrecision(weights_dtype=torch.float32), trained()
    plugin.convert_module(gone)
    del gone
    gc.collect()
    kept = trained(5)
    plugin.convert_module(kept)
    saved = plugin.state_dict()
    assert set(saved) == {"recipe", "model"}
    assert torch.equal(saved["model"]["scale"], fp8_state_dict(kept)["scale"])
    other = trained(4)
    plugin.convert_module(other)
    del kept
    gc.collect()
    saved = plugin.state_dict()
    assert set(saved) == {"recipe", "model"}
    assert torch.equal(saved["model"]["scale"], fp8_state_dict(other)["scale"])


def test_models_that_only_their_order_tells_apart_are_named() -> None:
    same = plugin_with(trained(), trained(4)).state_dict()
    with pytest.warns(UserWarning, match="model and model_1 hold tensors of the same names.*order"):
        plugin_with(mlp(), mlp()).load_state_dict(same)
    other = plugin_with(mlp(), mlp(depth=5)).state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin_with(mlp(), mlp(depth=5)).load_state_dict(other)
    assert not [warning for warning in caught if "same names" in str(warning.message)]


def test_another_recipe_than_the_saved_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fabric, "rank_zero_info", said.append)
    saved = plugin_with(mlp()).state_dict()
    for recipe, is_said in (("delayed", False), (DelayedScaling(margin=1), True), (Float8BlockScaling(), True)):
        plugin = plugin_with(mlp(), recipe=recipe)
        said.clear()
        plugin.load_state_dict(saved)
        text = "\n".join(said)
        assert ("it was saved with the recipe delayed; training continues with " in text) == is_said


def test_a_state_of_another_model_is_warned_of() -> None:
    saved = plugin_with(trained()).state_dict()
    saved["model"]["names"] = [f"net.{name}" for name in saved["model"]["names"]]
    with pytest.warns(UserWarning, match="6 tensors are not in the checkpoint and start empty: \\['2.input'"):
        plugin_with(mlp()).load_state_dict(saved)


def test_scales_move_to_the_format_and_margin_that_training_goes_on_with() -> None:
    """A scale for E5M2 would saturate E4M3, whose largest value is 128 times less, until the next update."""
    recipe = DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_history_len=4)
    saved = plugin_with(trained()).state_dict()
    net = mlp()
    plugin = plugin_with(net, recipe=recipe)
    plugin.load_state_dict(saved)
    amax = saved["model"]["amax_history"].double().amax(0)
    assert (amax > 0).all()
    torch.testing.assert_close(fp8_state_dict(net)["scale"].double(), 448 / 2 / amax, rtol=1e-6, atol=0)
    again = plugin_with(mlp(), recipe=DelayedScaling(amax_history_len=4))
    again.load_state_dict(plugin.state_dict())
    assert torch.equal(again.state_dict()["model"]["scale"], saved["model"]["scale"])


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_a_plugin_refuses_what_is_no_state(value: Any) -> None:
    plugin = plugin_with(trained())
    before = plugin.state_dict()
    for state in ({"model": value}, {**before, "other": value}, value):
        if isinstance(state, dict) and not state:
            continue
        with pytest.raises((ValueError, TypeError), match=r"FP8 state|load_state_dict takes a state dict"):
            plugin.load_state_dict(state)
    assert torch.equal(plugin.state_dict()["model"]["scale"], before["model"]["scale"])


def test_is_first_microbatch_is_a_bool() -> None:
    with pytest.raises(TypeError, match="is_first_microbatch='false' must be True or False"):
        Linear(4, 4)(torch.ones(2, 4), is_first_microbatch="false")


@pytest.mark.parametrize(
    "wrong", [{"fp8_format": "E5M2"}, {"fp8_format": 3}, {"margin": -1}, {"margin": None}, {"margin": 1.0}]
)
def test_what_scales_were_made_for_is_refused_where_no_recipe_says_it(wrong: dict[str, Any]) -> None:
    net = trained()
    before = fp8_state_dict(net)
    with pytest.raises(ValueError, match="^FP8 state's 'fp8_format'"):
        load_fp8_state_dict(net, {**before, **wrong, "scale": before["scale"] * 2})
    assert torch.equal(fp8_state_dict(net)["scale"], before["scale"])


def test_a_plain_loop_goes_on_in_another_format() -> None:
    net, x = trained(), torch.randn(32, 32)
    for _ in range(2):
        with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
            y = net[2](x)
        y.sum().backward()
        update_fp8_scales(net)
    state = fp8_state_dict(net)
    assert (state["fp8_format"], state["margin"]) == ("HYBRID", 0)
    load_fp8_state_dict(net, state)
    net.eval()  # whose scales nothing updates
    loud = x.clone().requires_grad_()
    with fp8_autocast(fp8_recipe=DelayedScaling(fp8_format=Format.E4M3)):
        y = net[2](loud)
    (gradient,) = torch.autograd.grad(y.sum(), loud)
    exact = torch.ones(32, 32).double() @ net[2].weight.double()
    assert (gradient.double() - exact).norm() < 0.1 * exact.norm()
