"""``lightning-fp8 sensitivity``, from the YAML of a training."""

from __future__ import annotations

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
    assert found.passes == 2 * (3 + 4)
    assert str(found) in printed.out
    assert "14 forward and backward passes" in printed.err
    main([*common, "-o", str(tmp_path / "untrained.json")])  # other weights, other errors
    assert Sensitivity.load(tmp_path / "untrained.json").rows != found.rows


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
