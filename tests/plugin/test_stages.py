"""Stages of the Trainer one after the other, and what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_fp8
from lightning_fp8 import (
    FP8FabricPrecision,
    FP8Precision,
    make_recipe,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Role
from tests.plugin.small_model import Mlp, loader, slots, trainer

# Stages


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_stages_without_training(stage: str) -> None:
    module, plugin = Mlp(), FP8Precision()
    result = getattr(trainer(plugin), stage)(module, loader())
    assert [type(layer) is lightning_fp8.Linear for layer in module.layers] == [False, True, True, False]
    history = plugin.histories["model"]
    assert not history.amax.any()
    assert not history.scale.any()
    if stage == "predict":
        assert [batch.dtype for batch in result] == [torch.bfloat16] * 2
        module.bfloat16()
        x = loader().dataset.tensors[0]
        with torch.no_grad():
            exact = module.layers(x.bfloat16())  # outside a region the layers run in high precision
        error = (torch.cat(result) - exact).norm() / exact.norm()
        assert 0 < error < 0.1


def test_stages_after_training_keep_conversion_and_scales() -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    history, layers = plugin.histories["model"], list(module.layers)
    state = history.state_dict()
    assert (state["scale"] > 0).all()
    assert state["updates"] == 2
    for stage in ("validate", "test", "predict"):
        getattr(run, stage)(module, loader())
        assert plugin.histories == {"model": history}
        assert all(new is old for new, old in zip(module.layers, layers))
        assert slots(module)[Role.INPUT].history is history
        after = history.state_dict()
        assert torch.equal(after["scale"], state["scale"])
        assert torch.equal(after["amax_history"], state["amax_history"])
        assert after["updates"] == 2


def test_training_again_goes_on_with_the_same_scales() -> None:
    module, plugin = Mlp(), FP8Precision()
    trainer(plugin).fit(module, loader())
    amax_history = plugin.histories["model"].amax_history.clone()
    trainer(plugin).fit(module, loader())
    history = plugin.histories["model"]
    assert history.updates == 4
    assert torch.equal(history.amax_history[:-2], amax_history[2:])
    assert (history.amax_history[-2:] > 0).all()


def test_another_plugin_takes_the_model_with_its_scales() -> None:
    module = Mlp()
    first, second = FP8Precision(), FP8Precision(num_layers_at_end_in_bf16=0)
    trainer(first).fit(module, loader())
    known = first.histories["model"].amax_history[-2:].clone()
    trainer(second).fit(module, loader())
    history = second.histories["model"]
    assert history.names[:6] == first.histories["model"].names
    assert len(history.names) == 9
    assert torch.equal(history.amax_history[-4:-2, :6], known)
    assert not history.amax_history[-4:-2, 6:].any()
    assert (history.amax_history[-2:] > 0).all()


def test_one_plugin_for_another_model_starts_over() -> None:
    first, second, plugin = Mlp(), Mlp(5), FP8Precision()
    trainer(plugin).fit(first, loader())
    old = plugin.histories["model"]
    kept = old.state_dict()
    trainer(plugin).fit(second, loader())
    new = plugin.histories["model"]
    assert new is not old
    assert list(plugin.histories) == ["model"]
    assert len(new.names) == 9
    assert new.updates == 2
    assert (new.amax_history[-2:] > 0).all()
    assert not new.amax_history[:-2].any()
    assert old.updates == 2
    assert torch.equal(old.scale, kept["scale"])
    assert torch.equal(old.amax_history, kept["amax_history"])


# Checkpoints


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_checkpoint_holds_the_state_and_loads_with_weights_only(recipe: Any, tmp_path: Path) -> None:
    module, plugin = Mlp(), FP8Precision(recipe)
    run = trainer(plugin)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Mlp().state_dict())
    state = checkpoint["FP8Precision"]
    assert set(state) == {"recipe", "model"}
    assert make_recipe(state["recipe"]) == make_recipe(recipe)
    expected = plugin.histories["model"]
    assert state["model"]["names"] == expected.names
    assert torch.equal(state["model"]["scale"], expected.scale)
    assert torch.equal(state["model"]["amax_history"], expected.amax_history)
    assert state["model"]["updates"] == (2 if recipe == "delayed" else 0)
    for key in ("scale", "amax_history"):
        assert state["model"][key].dtype == torch.float32
    if recipe == "delayed":
        assert state["model"]["amax_history"].shape == (1024, 6)
        assert (state["model"]["scale"] > 0).all()


def test_state_is_a_copy() -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    state = plugin.state_dict()
    scale = state["model"]["scale"].clone()
    plugin.histories["model"].scale.zero_()
    plugin.histories["model"].amax_history.zero_()
    assert torch.equal(state["model"]["scale"], scale)
    assert state["model"]["amax_history"].any()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_every_stage_takes_the_scales_of_a_checkpoint(stage: str, tmp_path: Path) -> None:
    module, plugin = Mlp(), FP8Precision()
    run = trainer(plugin)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "x.ckpt")
    restored = FP8Precision()
    getattr(trainer(restored), stage)(Mlp(), loader(), ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(restored.histories["model"].scale, plugin.histories["model"].scale)
    assert torch.equal(restored.histories["model"].amax_history, plugin.histories["model"].amax_history)


def test_state_before_conversion_waits_for_it() -> None:
    plugin = FP8FabricPrecision()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    names = ["1.input", "1.weight", "1.grad_output"]
    state = {"model": {"names": names, "scale": torch.arange(1.0, 4), "amax_history": torch.ones(2, 3), "updates": 7}}
    plugin.load_state_dict(state)
    assert not plugin.histories
    plugin.convert_module(model)
    history = plugin.histories["model"]
    assert history.scale.tolist() == [1, 2, 3]
    assert history.updates == 7
    history.scale.fill_(9)
    plugin.convert_module(model)  # waits no longer
    assert history.scale.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"model": {"names": []}}, "lacks"),
        ({"model": 3}, "must be a dictionary"),
        (
            {"model": {"names": ["a"], "scale": torch.zeros(2), "amax_history": torch.zeros(1, 1), "updates": 0}},
            r"'scale' has shape \(2,\) for 1 names",
        ),
        (
            {"model": {"names": ["a"], "scale": torch.ones(1), "amax_history": -torch.ones(1, 1), "updates": 0}},
            "damaged",
        ),
    ],
)
def test_malformed_state_changes_nothing(broken: dict[str, Any], message: str) -> None:
    plugin = FP8FabricPrecision()
    with pytest.raises(ValueError, match=message):
        plugin.load_state_dict(broken)
    plugin.convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    history = plugin.histories["model"]
    history.scale.fill_(2)
    with pytest.raises(ValueError, match=message):
        plugin.load_state_dict(broken)
    assert history.scale.tolist() == [2, 2, 2]
