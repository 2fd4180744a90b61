"""Models with a recipe of their own under a plugin, whose recipe they run by until the Trainer ends."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_fp8 import FP8FabricPrecision, convert_module, fp8_autocast
from lightning_fp8.convert.attention_calls.owners import owner_of
from lightning_fp8.convert.pinned import pinned_in
from tests.convert.fuse.runs import causal_lm
from tests.convert.pinned.test_pinned import loss_of, rows
from tests.small import Regression, fp8_trainer, regression_data


class LanguageModel(L.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def fitted(recipe: str | None, **options: Any) -> LanguageModel:
    pinned = {"recipe": recipe, "attention": "always"} if recipe else {}
    module = LanguageModel(convert_module(causal_lm(layers=4), **pinned))
    fp8_trainer("delayed", fp8=options).fit(module, torch.utils.data.DataLoader([rows(step) for step in range(4)]))
    return module


@pytest.mark.parametrize("attention", [False, "always"])
def test_the_plugins_recipe_is_used_until_the_trainer_ends(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_info", said.append)
    module = fitted("blockwise", attention=attention)
    told = "convert_module gave the model recipe='blockwise': forwards under the plugin run by recipe='delayed'"
    assert any(each.startswith(told) for each in said)
    plain = fitted(None, attention=attention)
    assert all(map(torch.equal, module.losses, plain.losses))
    model, layer = module.model, module.model.model.layers[1]
    ((root, pinned),) = pinned_in(module)
    assert root is model
    assert pinned.history is layer.mlp.down_proj.history
    assert pinned.history.plugin_recipe is None
    assert torch.equal(pinned.history.scale, plain.model.model.layers[1].mlp.down_proj.history.scale)
    with torch.no_grad():
        own = loss_of(model, 0)
        assert owner_of(layer.self_attn).own_context.recipe.name == "blockwise"  # type: ignore[union-attr]
        with fp8_autocast(fp8_recipe=pinned.recipe):
            assert torch.equal(loss_of(model, 0), own)
        with fp8_autocast(enabled=False):
            assert not torch.equal(loss_of(model, 0), own)


def test_a_delayed_recipe_of_its_own_goes_on_with_the_trainers_scales() -> None:
    module = Regression()
    convert_module(module.net, recipe="delayed")
    fp8_trainer("delayed").fit(module, regression_data())
    history = module.net[2].history
    updates, scale = history.updates, history.scale.clone()
    optimizer = module.configure_optimizers()
    module.net(torch.randn(8, 16) * 100).square().mean().backward()
    optimizer.step()
    assert history.updates == updates + 1 == 5
    assert not torch.equal(history.scale, scale)


def test_fabric_runs_its_recipe_and_the_model_its_own_elsewhere() -> None:
    fabric = L.Fabric(accelerator="cpu", plugins=[FP8FabricPrecision("tensorwise", weights_dtype="fp32")])
    model = convert_module(Regression().net, recipe="rowwise")
    x = torch.randn(8, 16)
    own = model(x)
    wrapped = fabric.setup(copy.deepcopy(model))
    with fp8_autocast(fp8_recipe="tensorwise"), torch.autocast("cpu", enabled=False):
        expected = model(x)
    found = wrapped(x)
    assert not torch.equal(own, expected)
    assert torch.equal(wrapped.module(x), own)
    assert wrapped.module[2].own_context.recipe.name == "rowwise"
    assert found.shape == expected.shape
