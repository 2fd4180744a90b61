"""Scales that stand still while a model trains are told, and no others."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import SGD

from lightning_fp8 import (
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    convert_module,
    fp8_autocast,
)
from lightning_fp8.delayed.history import AmaxHistory
from tests.delayed.test_optimizer_steps import Manual, fitted
from tests.small import Regression, fp8_trainer, mlp, quiet_trainer, regression_data

PATIENCE = 50
"""Instead of more forwards than a step has micro-batches, which would take long."""


def test_standing_scales_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.callbacks.fp8.PATIENCE", PATIENCE)

    def by_hand(optimizer: Any, loss: Tensor) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    model = Manual(by_hand)
    with pytest.warns(UserWarning, match=rf"{PATIENCE} training forwards since update 0.*update_scales\(\)") as caught:
        fitted(model, epochs=PATIENCE // 2)
    assert sum("stand still" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("region_for_each_step", [True, False])
def test_steps_without_an_update_are_told(region_for_each_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AmaxHistory, "patience", PATIENCE)
    model = mlp()
    convert_module(model, first_last_layers_bf16=False)
    optimizer = SGD(model.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with nullcontext() if region_for_each_step else fp8_autocast():
            for _ in range(2 * PATIENCE):
                with fp8_autocast():
                    loss = model(torch.randn(8, 16)).mean()
                loss.backward()
                optimizer.step()
    told = [str(warning.message) for warning in caught if "stand still" in str(warning.message)]
    assert len(told) == (0 if region_for_each_step else 1)
    assert all(f"{PATIENCE} optimizer steps since update" in message for message in told)


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
            history.patience = PATIENCE
        for micro_batches in (PATIENCE // 2, 3 * PATIENCE):  # from the first step on it is known that they come
            for _ in range(micro_batches):
                fabric.backward(module(torch.randn(8, 16)).mean())
            optimizer.step()
    assert not [warning for warning in caught if "stand still" in str(warning.message)]
