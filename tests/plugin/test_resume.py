"""Resume is bit for bit, on one device: 2N epochs straight equal N epochs and N more from the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_fp8 import (
    DelayedScaling,
    FP8FabricPrecision,
    FP8Precision,
    convert_module,
    fp8_autocast,
    fp8_state_dict,
    load_fp8_state_dict,
)
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.plugin import states
from tests.small import Regression, equal_weights, fp8_trainer, mlp, quiet_trainer, regression_data


def train(epochs: int, recipe: Any, ours: bool = False, ckpt_path: Path | None = None) -> tuple[L.Trainer, Regression]:
    L.seed_everything(1)
    model, trainer = Regression(ours), fp8_trainer(recipe, max_epochs=epochs)
    trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.parametrize("ours", [False, True], ids=["converted", "our modules"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_is_bit_for_bit(recipe: str, ours: bool, tmp_path: Path) -> None:
    _, straight = train(4, recipe, ours)
    first, half = train(2, recipe, ours)
    first.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed = train(4, recipe, ours, tmp_path / "half.ckpt")
    assert trainer.precision_plugin.summary.num_fp8 == 2
    assert half.losses + resumed.losses == straight.losses
    assert equal_weights(resumed, straight)


@pytest.mark.parametrize(("recipe", "lines"), [("delayed", 1), ("tensorwise", 0)])
def test_a_resumed_run_says_how_many_scales_came_back(
    recipe: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = train(2, recipe)
    first.save_checkpoint(tmp_path / "half.ckpt")
    said: list[str] = []
    monkeypatch.setattr(states, "rank_zero_info", said.append)
    train(3, recipe, ckpt_path=tmp_path / "half.ckpt")
    assert said == lines * ["FP8 state: the scales of 6 of 6 tensors are restored, after 8 updates"]


def test_without_the_fp8_state_the_resumed_run_differs(tmp_path: Path) -> None:
    _, straight = train(4, "delayed")
    first, half = train(2, "delayed")
    first.save_checkpoint(tmp_path / "half.ckpt")
    file = torch.load(tmp_path / "half.ckpt", weights_only=True)
    del file["FP8Precision"]
    torch.save(file, tmp_path / "bare.ckpt")
    _, resumed = train(4, "delayed", ckpt_path=tmp_path / "bare.ckpt")
    assert half.losses + resumed.losses != straight.losses


def test_training_after_a_search_for_the_learning_rate_is_as_without(tmp_path: Path) -> None:
    _, straight = train(2, "delayed")
    L.seed_everything(1)
    model, trainer = Regression(), fp8_trainer("delayed", max_epochs=2, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(model, regression_data(), num_training=6, update_attr=False)
    assert trainer.precision_plugin.histories["model"].updates == 0
    assert len(model.losses) == 6
    model.losses.clear()
    trainer.fit(model, regression_data())
    assert model.losses == straight.losses
    assert equal_weights(model, straight)


def test_test_from_a_file_equals_test_of_the_live_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.precision.rank_zero_info", said.append)
    trainer, model = train(2, "delayed")
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    live = trainer.test(model, regression_data(seed=5), verbose=False)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    def test_from(file: str) -> Any:
        return fp8_trainer().test(Regression(), regression_data(seed=5), ckpt_path=tmp_path / file, verbose=False)

    assert test_from("full.ckpt") == live
    assert not any("has no FP8 scales" in each for each in said)
    assert test_from("weights.ckpt") != live  # scaled from themselves: close, not equal
    assert sum("weights.ckpt has no FP8 scales" in each for each in said) == 1
    assert test_from("weights.ckpt")[0]["test_loss"] == pytest.approx(live[0]["test_loss"], rel=0.1)


def test_load_from_checkpoint_without_a_trainer(tmp_path: Path) -> None:
    trainer, model = train(2, "delayed")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    assert equal_weights(loaded, model)
    assert type(loaded.net[2]) is torch.nn.Linear

    convert_module(loaded)
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert load_fp8_state_dict(loaded, file["FP8Precision"]["model"]) == []
    x = next(iter(regression_data()))[0].bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), fp8_autocast():
        assert torch.equal(loaded(x), model(x))


def test_bf16_checkpoint_into_fp8_and_back(tmp_path: Path) -> None:
    baseline = quiet_trainer(precision="bf16-true", max_epochs=2)
    model = Regression()
    baseline.fit(model, regression_data())
    baseline.save_checkpoint(tmp_path / "bf16.ckpt")

    _, loaded = train(2, "delayed", ckpt_path=tmp_path / "bf16.ckpt")  # nothing is left to train
    assert loaded.losses == []
    assert equal_weights(loaded, model)

    trainer, resumed = train(4, "delayed", ckpt_path=tmp_path / "bf16.ckpt")
    assert len(resumed.losses) == 8
    assert sum(resumed.losses[-4:]) < sum(model.losses[:4])
    trainer.save_checkpoint(tmp_path / "fp8.ckpt")

    back, again = quiet_trainer(precision="bf16-true", max_epochs=6), Regression()
    back.fit(again, regression_data(), ckpt_path=tmp_path / "fp8.ckpt")
    assert len(again.losses) == 8
    assert sum(again.losses[-4:]) < sum(model.losses[:4])
    assert again.state_dict().keys() == resumed.state_dict().keys()


@pytest.mark.parametrize("length", [6, 16])
def test_a_history_of_another_length_is_cut_or_padded(length: int, tmp_path: Path) -> None:
    trainer, _ = train(2, DelayedScaling(amax_history_len=8))  # 8 steps fill the window
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["FP8Precision"]["model"]["amax_history"]
    other = fp8_trainer(DelayedScaling(amax_history_len=length), max_epochs=3)
    other.fit(Regression(), regression_data(), ckpt_path=tmp_path / "a.ckpt")
    amax_history = other.precision_plugin.histories["model"].amax_history
    assert amax_history.shape[0] == length
    kept = min(8, length - 4 - 1)  # four steps came after the file; the first row is 0 between steps
    assert kept > 0
    assert torch.equal(amax_history[length - 4 - kept : length - 4], saved[8 - kept :])
    assert (saved[1:] > 0).all()
    assert not amax_history[: length - 4 - kept].any()


@pytest.mark.parametrize(("saved", "resumed"), [("delayed", "blockwise"), ("blockwise", "delayed")])
def test_another_recipe_takes_over(saved: str, resumed: str, tmp_path: Path) -> None:
    trainer, _ = train(2, saved)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del file["FP8Precision"]
    torch.save(file, tmp_path / "bare.ckpt")
    _, model = train(4, resumed, ckpt_path=tmp_path / "a.ckpt")
    _, without_state = train(4, resumed, ckpt_path=tmp_path / "bare.ckpt")
    _, same = train(4, saved, ckpt_path=tmp_path / "a.ckpt")
    assert len(model.losses) == 8
    assert model.losses == without_state.losses  # one of the two has no state to give or to take
    assert equal_weights(model, without_state)
    assert model.losses != same.losses


def test_a_file_of_weights_alone_starts_a_new_run(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
    trainer, model = fp8_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True), Regression()
    trainer.fit(model, regression_data())
    file = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "FP8Precision" not in file
    with pytest.raises(KeyError, match="contains only the model"):  # Lightning's own answer
        fp8_trainer(max_epochs=4).fit(Regression(), regression_data(), ckpt_path=tmp_path / "weights.ckpt")

    again = Regression.load_from_checkpoint(tmp_path / "weights.ckpt", map_location="cpu")
    assert equal_weights(again, model)
    run = fp8_trainer(max_epochs=1)
    run.fit(again, regression_data())
    assert run.precision_plugin.histories["model"].updates == len(again.losses) == 4
    assert sum(again.losses) < sum(model.losses[:4])


@pytest.mark.parametrize("damage", ["dtype", "shape", "missing", "nan"])
def test_damaged_state_is_refused_before_training(damage: str, tmp_path: Path) -> None:
    trainer, _ = train(1, "delayed")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state = file["FP8Precision"]["model"]
    if damage == "dtype":
        state["scale"] = state["scale"].double()
    elif damage == "shape":
        state["amax_history"] = state["amax_history"][:, 1:]
    elif damage == "nan":
        state["scale"][0] = float("nan")
    else:
        del state["amax_history"]
    torch.save(file, tmp_path / "damaged.ckpt")
    model = Regression()
    with pytest.raises(ValueError, match=r"FP8 state.*(scale|amax_history)"):
        fp8_trainer(max_epochs=2).fit(model, regression_data(), ckpt_path=tmp_path / "damaged.ckpt")
    assert model.losses == []


@pytest.mark.parametrize("key", ["scale", "amax_history"])
def test_a_refused_state_changes_nothing(key: str) -> None:
    trainer, model = train(2, "delayed")
    history = trainer.precision_plugin.histories["model"]
    before = fp8_state_dict(model)
    assert before["scale"].min() > 0
    assert before["amax_history"][-1].min() > 0
    broken = {**before, key: before[key].half()}
    with pytest.raises(ValueError, match="float32"):
        load_fp8_state_dict(model, broken)
    with pytest.raises(ValueError, match="float32"):
        trainer.precision_plugin.load_state_dict({"model": broken})
    after = fp8_state_dict(model)
    assert trainer.precision_plugin.histories["model"] is history
    assert before["names"] == after["names"]
    assert before["updates"] == after["updates"] == 8
    assert torch.equal(before["scale"], after["scale"])
    assert torch.equal(before["amax_history"], after["amax_history"])


def test_one_damaged_model_among_two_leaves_both_alone() -> None:
    plugin = FP8FabricPrecision()
    models = [plugin.convert_module(mlp()) for _ in range(2)]
    assert list(plugin.histories) == ["model", "model_1"]
    assert len(models) == 2  # held: what is gone is neither saved nor loaded
    good = plugin.state_dict()
    good["model"]["scale"].fill_(3)
    broken = {**good, "model_1": {**good["model_1"], "scale": good["model_1"]["scale"].double()}}
    with pytest.raises(ValueError, match="float32"):
        plugin.load_state_dict(broken)
    assert not plugin.histories["model"].scale.any()
    plugin.load_state_dict(good)
    assert (plugin.histories["model"].scale == 3).all()


def test_a_state_of_transformer_engine_waits_until_the_trainer_restores_the_plugin() -> None:
    plugin = FP8Precision(first_last_layers_bf16=False)
    model = nn.Sequential(nn.Linear(16, 16))
    plugin.convert_module(model)
    before = fp8_state_dict(model)
    with pytest.raises(ValueError, match="FP8 state lacks"):
        plugin.set_te_state({})
    plugin.set_te_state({**before, "scale": torch.tensor([2.0, 4.0, 8.0])})
    assert torch.equal(fp8_state_dict(model)["scale"], before["scale"])
    plugin.on_load_checkpoint({})
    assert fp8_state_dict(model)["scale"].tolist() == [2.0, 4.0, 8.0]
    plugin.on_load_checkpoint({"FP8Precision": {}})  # the Trainer calls load_state_dict next
    assert fp8_state_dict(model)["scale"].tolist() == [2.0, 4.0, 8.0]
    plugin.on_load_checkpoint({})  # another file
    assert fp8_state_dict(model)["scale"].tolist() == [0.0, 0.0, 0.0]
