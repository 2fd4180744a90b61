"""``lightning-fp8 sensitivity``, from the YAML of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_fp8.cli.main import main
from lightning_fp8.sensitivity import Sensitivity

CONFIG = """
trainer: {max_steps: 2, logger: false}
model:
  class_path: examples.train_gpt.GPT
  init_args: {width: 64, depth: 3, heads: 2}
data:
  class_path: examples.train_gpt.StdlibBytes
  init_args: {length: 16, batch_size: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path / "my.yaml"


def test_layers_of_a_training_are_ranked(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.train_gpt import GPT

    torch.manual_seed(5)
    torch.save({"state_dict": GPT(width=64, depth=3, heads=2).state_dict()}, tmp_path / "last.ckpt")
    common = ["sensitivity", "--config", str(config), "--batches", "2", "--recipe", "tensorwise", "--group", "block"]
    main([*common, "--ckpt_path", str(tmp_path / "last.ckpt"), "--budget", "2", "-o", str(tmp_path / "found.json")])
    printed = capsys.readouterr()
    found = Sensitivity.load(tmp_path / "found.json")
    assert sorted(row.name for row in found.rows) == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.check is not None
    assert found.check.budget == 0.02
    assert found.passes == 2 * (3 + 5)
    assert str(found) in printed.out
    assert "16 forward and backward passes" in printed.err
    main([*common, "-o", str(tmp_path / "untrained.json")])  # other weights, other errors
    assert Sensitivity.load(tmp_path / "untrained.json").rows != found.rows


MODELS = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.layers()

    def layers(self):
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(*torch.randn(2, 64, 64, generator=generator)), 32)


class InSetup(Plain):
    def layers(self):
        return None

    def setup(self, stage):
        self.net = Plain.layers(self)


class Named(Plain):
    def train_dataloader(self):
        return {"a": Plain.train_dataloader(self), "b": Plain.train_dataloader(self)}

    def training_step(self, batch, batch_idx):
        return Plain.training_step(self, batch["a"], 0) + Plain.training_step(self, batch["b"], 0)


class Transfers(Plain):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1], "transferred"]

    def training_step(self, batch, batch_idx):
        assert batch[2] == "transferred"
        return Plain.training_step(self, batch, 0)


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Attached(Plain):
    def training_step(self, batch, batch_idx):
        return Plain.training_step(self, batch, 0) * (1 + self.trainer.global_step)


class NoData(Plain):
    train_dataloader = L.LightningModule.train_dataloader
"""
YAML = "trainer: {{max_steps: 2, logger: false{plugin}}}\nmodel: {{class_path: sensitivity_models.{name}}}\n"


@pytest.fixture
def yaml_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    (tmp_path / "sensitivity_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, plugin: str = "") -> Path:
        (tmp_path / "model.yaml").write_text(YAML.format(name=name, plugin=plugin))
        return tmp_path / "model.yaml"

    return write


@pytest.mark.parametrize("name", ["Plain", "InSetup", "Named", "Transfers"])
def test_model_and_data_are_prepared_as_by_fit(name: str, yaml_of: Callable[..., Path], tmp_path: Path) -> None:
    main(["sensitivity", "--config", str(yaml_of(name)), "--batches", "2", "-o", str(tmp_path / "found.json")])
    found = Sensitivity.load(tmp_path / "found.json")
    assert sorted(row.name for row in found.rows) == ["net.0", "net.1", "net.2", "net.3"]
    assert 0 < found.rows[0].error < 0.2


def test_the_recipe_is_that_of_the_yaml(yaml_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    plugin = ", plugins: {class_path: lightning_fp8.FP8Precision, init_args: {recipe: mxfp8}}"
    config = str(yaml_of("Plain", plugin))
    for arguments, recipe in (([], "mxfp8"), (["--recipe", "rowwise"], "rowwise")):
        main(["sensitivity", "--config", config, "--batches", "1", *arguments])
        assert capsys.readouterr().out.startswith(f"in FP8 alone, recipe {recipe} ")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Manual", [], "manual optimization is not supported; call"),
        ("Attached", [], "training_step must not use self.trainer here"),
        ("NoData", [], "model.yaml has no data:, and NoData has no train_dataloader"),
        ("Plain", ["--out", "no/folder.json"], "the folder of no/folder.json does not exist"),
        ("Plain", ["--plot", "picture.unknown"], "picture.unknown|unknown"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    name: str, arguments: list[str], message: str, yaml_of: Callable[..., Path]
) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["sensitivity", "--config", str(yaml_of(name)), "--batches", "1", *arguments])


@pytest.mark.parametrize("budget", ["0", "1%", "inf"])
def test_a_budget_is_in_percent(budget: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sensitivity", "--config", str(config), "--budget", budget])
    assert f"{budget!r} must be a positive number, in percent: 1 for 1 %" in capsys.readouterr().err


def test_wrong_files_and_arguments_are_refused(config: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (["--config", "none.yaml"], "none.yaml does not exist; lightning-fp8 config delayed prints YAML"),
        (["--config", str(config), "--ckpt_path", "none.ckpt"], "none.ckpt does not exist"),
        (["--config", str(config), "--recipe", "fp4", "--batches", "1"], "lightning-fp8 sensitivity: .*fp4"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["sensitivity", *arguments])
    torch.save({"state_dict": {"x": torch.ones(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit, match="has no weights that load into this model"):
        main(["sensitivity", "--config", str(config), "--ckpt_path", str(tmp_path / "other.ckpt")])


def test_no_pickle_is_executed(config: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'executed')!r}, 'w').close()",)

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(SystemExit, match="no weights that load into this model: Weights only load failed"):
        main(["sensitivity", "--config", str(config), "--ckpt_path", str(tmp_path / "evil.ckpt")])
    assert not (tmp_path / "executed").exists()
