"""Warnings about scales that are not updated while a model trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fp8 import (
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
)
from lightning_fp8.delayed.watch import Watch
from tests.delayed.test_optimizer_steps import Manual, fitted
from tests.small import Regression, fp8_trainer, mlp, quiet_trainer, regression_data
from tests.tiers import thorough

PATIENCE = 50
"""Instead of more forwards than a step has micro-batches, which would take long."""


def test_standing_scales_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.plugin.precision.PATIENCE", PATIENCE)

    def by_hand(optimizer: Any, loss: Tensor) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    model = Manual(by_hand)
    with pytest.warns(UserWarning, match=rf"{PATIENCE} training forwards since update 0.*update_scales\(\)") as caught:
        fitted(model, epochs=PATIENCE // 2)
    assert sum("not updated" in str(warning.message) for warning in caught) == 1


def test_standing_scales_of_a_plain_loop_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of a model that only waits beside it."""
    monkeypatch.setattr(Watch, "patience", PATIENCE)
    model, waiting = (convert_module(mlp(), first_last_layers_bf16=False) for _ in range(2))
    with fp8_autocast():
        waiting(torch.randn(8, 16)).mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * PATIENCE):
            with fp8_autocast():
                loss = model(torch.randn(8, 16)).mean()
            loss.backward()
    told = [str(warning.message) for warning in caught if "not updated" in str(warning.message)]
    assert len(told) == 1
    assert f"{PATIENCE} training forwards since update 0" in told[0]
    assert "update_fp8_scales(model)" in told[0]


def test_one_region_around_all_steps_lets_scales_follow() -> None:
    model = convert_module(mlp(), first_last_layers_bf16=False)
    optimizer = SGD(model.parameters(), 0.01)
    with fp8_autocast():
        for _ in range(5):
            with fp8_autocast():
                loss = model(torch.randn(8, 16)).mean()
            loss.backward()
            optimizer.step()
    assert fp8_state_dict(model)["updates"] == 5
    assert (fp8_state_dict(model)["scale"] > 0).all()


def test_layers_that_no_optimizer_holds_follow_the_optimizer_of_their_model() -> None:
    """A probe on layers that require gradients for nothing."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    convert_module(model, first_last_layers_bf16=False)
    optimizer = SGD(model[1].parameters(), 0.01)
    for _ in range(2):
        with fp8_autocast():
            loss = model(torch.randn(8, 16)).mean()
        loss.backward()
        optimizer.step()
    assert (fp8_state_dict(model)["scale"] > 0).all()


@thorough
def test_training_and_evaluation_are_not_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(Regression(), epochs=30)
        trainer = fp8_trainer(max_epochs=2, accumulate_grad_batches=150)
        trainer.fit(Regression(), regression_data(rows=16 * 150))
        trainer = quiet_trainer(plugins=[FP8Precision()], callbacks=[FP8Callback()], inference_mode=False)
        for _ in range(4):
            trainer.validate(Regression(), regression_data(rows=600), verbose=False)
        plugin = FP8FabricPrecision()
        fabric, model = Fabric(accelerator="cpu", devices=1, plugins=[plugin]), mlp()
        module, optimizer = fabric.setup(model, SGD(model.parameters(), 0.1))
        for history in plugin.histories.values():
            history.watch.patience = PATIENCE
        for micro_batches in (PATIENCE // 2, 3 * PATIENCE):  # from the first step on it is known that they come
            for _ in range(micro_batches):
                fabric.backward(module(torch.randn(8, 16)).mean())
            optimizer.step()
    assert not [warning for warning in caught if "not updated" in str(warning.message)]
