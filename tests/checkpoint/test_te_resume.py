"""Lightning resumes from Transformer Engine's checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from examples import resume_te_checkpoint
from lightning_fp8 import DelayedScaling
from lightning_fp8.te.torch_file import CheckpointError
from tests.checkpoint.te_models import (
    assert_rows,
    expected_rows,
    lightning_checkpoints,
)
from tests.checkpoint.te_writer import VERSIONS
from tests.small import Regression, fp8_trainer, regression_data

# Under Lightning.


@pytest.fixture(scope="module")
def lightning_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    return lightning_checkpoints(tmp_path_factory.mktemp("ckpt"))


@pytest.mark.parametrize("ours", [False, True], ids=["converted", "our modules"])
@pytest.mark.parametrize("version", VERSIONS)
def test_fit_resumes_from_every_version(version: str, ours: bool, lightning_files: Any, tmp_path: Path) -> None:
    written, path = lightning_files[version]
    first_scales: dict[str, float] = {}

    class Record(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            history = trainer.precision_plugin.histories["model"]
            if not first_scales:
                first_scales.update(zip(history.names, history.scale.tolist()))

    recipe = DelayedScaling(amax_history_len=8)

    def fit(epochs: int, ckpt_path: Path) -> tuple[L.Trainer, Regression]:
        L.seed_everything(1)
        trainer, model = fp8_trainer(recipe, max_epochs=epochs), Regression(ours)
        trainer.callbacks.append(Record())
        trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
        return trainer, model

    trainer, model = fit(3, path)
    assert len(model.losses) == 8
    expected = {name: float(scale) for name, (scale, _) in expected_rows(written["states"]).items()}
    assert len(first_scales) == 6
    assert first_scales == {name: expected[name] for name in first_scales}
    report = trainer.callbacks[0].te_report
    assert len(report.with_outcome("loaded")) == 2

    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert not [key for key in saved["state_dict"] if "_extra_state" in key]
    _, straight = fit(5, path)
    _, resumed = fit(5, tmp_path / "ours.ckpt")
    assert model.losses + resumed.losses == straight.losses


def test_a_damaged_file_stops_fit_before_anything_is_loaded(lightning_files: Any, tmp_path: Path) -> None:
    file = torch.load(lightning_files["1.7"][1], weights_only=True)
    key = next(key for key in reversed(file["state_dict"]) if key.endswith("_extra_state"))
    file["state_dict"][key] = io.BytesIO(b"PK\x03\x04 and nothing more")
    torch.save(file, tmp_path / "bad.ckpt")
    model = Regression()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"bad\.ckpt: {key}: .*damaged"):
        fp8_trainer(max_epochs=3).fit(model, regression_data(), ckpt_path=tmp_path / "bad.ckpt")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("version", ["1.7", "2.18"])
def test_load_from_checkpoint_without_a_trainer(version: str, lightning_files: Any) -> None:
    written, path = lightning_files[version]
    model = Regression.load_from_checkpoint(path, map_location="cpu", ours=True)
    assert_rows(model, expected_rows(written["states"]))


def test_test_from_a_file_of_weights_alone(lightning_files: Any, tmp_path: Path) -> None:
    file = torch.load(lightning_files["1.7"][1], weights_only=True)
    for key in ("callbacks", "optimizer_states", "lr_schedulers", "loops"):
        file.pop(key, None)
    torch.save(file, tmp_path / "weights.ckpt")
    trainer = fp8_trainer(DelayedScaling(amax_history_len=8))
    trainer.test(Regression(), regression_data(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    history = trainer.precision_plugin.histories["model"]
    rows = expected_rows(lightning_files["1.7"][0]["states"])
    assert history.scale.tolist() == [float(rows[name][0]) for name in history.names]


def test_the_worked_example_resumes_a_1_7_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "te_1_7.ckpt"
    resume_te_checkpoint.main(path)
    printed = capsys.readouterr().out
    assert "2 loaded" in printed
    assert path.exists()
