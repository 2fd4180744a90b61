"""A trained model goes back to a checkpoint: its scales are those of the file, or empty if the file has none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import (
    FP8Callback,
    FP8FabricPrecision,
    FP8Precision,
    export_te_state_dict,
    fp8_state_dict,
    reset_fp8_scales,
)
from lightning_fp8.plugin import fabric as fabric_plugin
from lightning_fp8.plugin import precision, states
from tests.small import Regression, mlp, quiet_trainer, regression_data


def bursting(factor: float = 1e4) -> DataLoader[Any]:
    x, y = regression_data().dataset.tensors  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(factor * x, y), 16)


def trainer(plugin: FP8Precision | None = None, epochs: int = 1, **options: Any) -> L.Trainer:
    return quiet_trainer(plugins=[plugin or FP8Precision()], max_epochs=epochs, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after one epoch: with the state, and without it in the ways that exist."""
    folder = tmp_path_factory.mktemp("files")
    L.seed_everything(1)
    run = trainer()
    run.fit(Regression(), regression_data())
    run.save_checkpoint(folder / "with.ckpt")
    file = torch.load(folder / "with.ckpt", weights_only=True)
    own = file.pop("FP8Precision")
    torch.save(file, folder / "without.ckpt")
    nothing = {key: value[..., :0] if isinstance(value, torch.Tensor) else value for key, value in own["model"].items()}
    others = {"lacks the model": {"recipe": own["recipe"], "model_1": own["model"]}, "empty": {}}
    for name, entry in {**others, "no tensors": {**own, "model": {**nothing, "names": []}}}.items():
        torch.save({**file, "FP8Precision": entry}, folder / f"{name}.ckpt")
    return folder


FILES = ["with", "without", "lacks the model", "empty", "no tensors"]


def burst(run: L.Trainer, model: Regression) -> None:
    """An epoch of data that are far too large; then the scales flush what is ordinary."""
    run.fit_loop.epoch_progress.reset()
    model.lr = 0.0
    run.fit(model, bursting())
    model.lr, model.losses = 1e-2, []
    assert run.precision_plugin.histories["model"].scale.min() < 1


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("same", ["trainer", "plugin", "nothing"])
def test_a_trained_model_continues_as_a_new_one(
    file: str, same: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files / f"{file}.ckpt"

    def results(model: Regression, run: L.Trainer) -> tuple[Any, ...]:
        tested = run.test(model, regression_data(seed=5), ckpt_path=path, verbose=False)
        if converted:
            burst(run, model)
        run.fit(model, regression_data(), ckpt_path=path)
        return tested, model.losses, fp8_state_dict(model)["scale"].tolist()

    converted = False
    plugin = FP8Precision()
    expected = results(Regression(), trainer(epochs=3))
    assert len(expected[1]) == 8

    first, model = trainer(plugin, epochs=3), Regression()
    burst(first, model)
    converted = True
    again = {"trainer": first, "plugin": None, "nothing": trainer(epochs=3)}[same] or trainer(plugin, epochs=3)
    said: list[str] = []
    monkeypatch.setattr(precision, "rank_zero_info", said.append)
    monkeypatch.setattr(states, "rank_zero_info", said.append)
    monkeypatch.setattr(fabric_plugin, "rank_zero_info", said.append)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="load_state_dict has changed weights")
        assert results(model, again) == expected
    about = [each for each in said if "scales" in each and "restored" not in each and "emulated" not in each]
    assert len(about) == (0 if file == "with" else 2), about  # for test and for fit
    assert all(f"{path} has no FP8 scales: they start empty" in each for each in about)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_use_the_scales_of_the_file(stage: str, files: Path) -> None:
    model, run = Regression(), trainer(epochs=3)
    model.predict_step = lambda batch, batch_idx: model(batch[0])  # type: ignore[method-assign]
    burst(run, model)
    saved = torch.load(files / "with.ckpt", weights_only=True)["FP8Precision"]["model"]["scale"]
    for file, scale in (("with", saved), ("without", torch.zeros_like(saved)), ("with", saved)):
        getattr(run, stage)(model, regression_data(), ckpt_path=files / f"{file}.ckpt")
        assert torch.equal(run.precision_plugin.histories["model"].scale, scale)


@pytest.mark.parametrize("by", ["the modules", "the callback"])
def test_files_of_transformer_engine_bring_their_scales_to_a_trained_model(by: str, tmp_path: Path) -> None:
    def run() -> L.Trainer:
        return trainer(epochs=3, callbacks=[FP8Callback()] * (by == "the callback"))

    ours = by == "the modules"
    first, saved = run(), Regression(ours=True)
    first.fit_loop.max_epochs = 1
    first.fit(saved, regression_data())
    first.save_checkpoint(tmp_path / "te.ckpt")
    file = torch.load(tmp_path / "te.ckpt", weights_only=True)
    scales = file.pop("FP8Precision")["model"]["scale"]
    torch.save(file, tmp_path / "without.ckpt")
    torch.save({**file, "state_dict": export_te_state_dict(saved, version="1.13")}, tmp_path / "te.ckpt")

    def results(model: Regression, name: str) -> Any:
        again = run()
        tested = again.test(model, regression_data(seed=5), ckpt_path=tmp_path / name, verbose=False)
        return tested, again.precision_plugin.histories["model"].scale.tolist()

    new = {name: results(Regression(ours), name) for name in ("te.ckpt", "without.ckpt")}
    assert new["te.ckpt"][1] == scales.tolist()
    assert new["without.ckpt"][1] == [0.0] * len(scales)
    trained = Regression(ours)
    burst(run(), trained)
    for name in ("te.ckpt", "without.ckpt", "te.ckpt"):
        assert results(trained, name) == new[name]


def steps(fabric: Fabric, model: nn.Module, optimizer: Any, data: Any) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fabric_run() -> tuple[Fabric, FP8FabricPrecision, nn.Module, Any]:
    torch.manual_seed(0)
    plugin = FP8FabricPrecision()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    net = mlp()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.05))
    return fabric, plugin, model, optimizer


@pytest.mark.parametrize("entry", ["absent", "lacks the model", "present"])
@pytest.mark.parametrize("plugin_first", [False, True])
def test_fabric(entry: str, plugin_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(fabric_plugin, "rank_zero_info", said.append)
    fabric, plugin, model, optimizer = fabric_run()
    objects = {"model": model, "optimizer": optimizer}
    steps(fabric, model, optimizer, regression_data())
    entries = {"absent": {}, "present": {"fp8": plugin}, "lacks the model": {"fp8": {"recipe": {}}}}
    fabric.save(tmp_path / "a.ckpt", {**objects, **entries[entry]})

    def load(plugin: FP8FabricPrecision, model: nn.Module, optimizer: Any) -> None:
        state = {"model": model, "optimizer": optimizer}
        state = {"fp8": plugin, **state} if plugin_first else {**state, "fp8": plugin}
        fabric.load(tmp_path / "a.ckpt", state, strict=entry == "present")

    other, *new = fabric_run()
    load(*new)
    expected = steps(other, new[1], new[2], regression_data())
    for _ in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        steps(fabric, model, optimizer, bursting())
        said.clear()
        load(plugin, model, optimizer)
        if entry == "absent":  # Fabric does not call the plugin
            with pytest.warns(UserWarning, match="load_state_dict has changed weights"):
                steps(fabric, model, optimizer, regression_data())
            load(plugin, model, optimizer)
            reset_fp8_scales(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="load_state_dict has changed weights")
            assert steps(fabric, model, optimizer, regression_data()) == expected
        told = [each for each in said if "start empty" in each]
        assert told == (
            ["FP8 state: the checkpoint has none of model, whose scales start empty"] * (entry == "lacks the model")
        )
