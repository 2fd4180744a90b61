"""``lightning-fp8 checkpoint``: what a file holds, and the same file for everybody."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import FP8FabricPrecision, Linear, convert_module, export_te_state_dict, fp8_state_dict
from lightning_fp8.cli.checkpoint import inspect
from lightning_fp8.cli.main import main
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.te.unpickle import CheckpointError
from tests.checkpoint.te_models import blocks, expected_rows, lightning_checkpoints
from tests.small import Regression, fp8_trainer, mlp, regression_data


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lightning_checkpoints(tmp_path_factory.mktemp("ckpt"))


@pytest.mark.parametrize(
    ("version", "writer"), [("1.5", "0.12 to 1.5"), ("1.7", "1.6 to 1.7"), ("2.18", "2.0 or later")]
)
def test_inspect_prints_every_tensor(version: str, writer: str, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    written, path = files[version]
    main(["checkpoint", "inspect", str(path)])
    printed = capsys.readouterr().out
    assert f"written by {writer}" in printed
    cells = {line.split()[0]: line.split()[1:4] for line in printed.splitlines()[2:]}
    rows = expected_rows(written["states"])
    assert cells.keys() == rows.keys()
    for name, (scale, amax_history) in rows.items():
        assert cells[name] == [f"{float(scale):.6g}", f"{amax_history.max():.6g}", f"{amax_history[-1]:.6g}"]


def _new_file(path: Path) -> Path:
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize("version", ["1.7", "2.18"])
def test_a_converted_file_resumes_like_the_original(version: str, files: Any, tmp_path: Path) -> None:
    _, path = files[version]
    main(["checkpoint", "convert", str(path), str(tmp_path / "ours.ckpt")])
    assert (tmp_path / "ours.ckpt").stat().st_mode == _new_file(tmp_path / "new").stat().st_mode, "as any new file's"
    original, converted = torch.load(path, weights_only=True), torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert not [key for key in converted["state_dict"] if "_extra_state" in key]
    assert converted["loops"] == original["loops"]

    losses = []
    for file in (path, tmp_path / "ours.ckpt"):
        torch.manual_seed(1)
        model = Regression()
        fp8_trainer("delayed", max_epochs=3).fit(model, regression_data(), ckpt_path=file)
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    Regression.load_from_checkpoint(tmp_path / "ours.ckpt", map_location="cpu", strict=True)


def test_inspect_of_a_converted_file_and_of_one_without_state(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, path = files["1.12"]
    main(["checkpoint", "convert", str(path), str(tmp_path / "ours.ckpt")])
    main(["checkpoint", "inspect", str(tmp_path / "ours.ckpt")])
    printed = capsys.readouterr().out
    assert "written by lightning_fp8" in printed
    assert all(name in printed for name in expected_rows(written["states"]))
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "plain.ckpt")
    main(["checkpoint", "inspect", str(tmp_path / "plain.ckpt")])
    assert "no FP8 state" in capsys.readouterr().out


def test_inspect_finds_our_state_wherever_it_is_saved(tmp_path: Path) -> None:
    model = convert_module(mlp())
    plugin = FP8FabricPrecision("delayed")
    plugin.convert_module(model)
    state = fp8_state_dict(model)
    contents = {
        "fabric": {"model": model.state_dict(), "fp8": plugin.state_dict()},
        "nested": {"model": model.state_dict(), "scales": state},
        "plain": state,
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        printed = inspect(tmp_path / name)
        assert "written by lightning_fp8" in printed
        assert [line.split()[0] for line in printed.splitlines()[2:]] == state["names"]
    torch.save({"fp8": {**state, "updates": -1}}, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=r"^fp8: FP8 state's 'updates' must be a count"):
        inspect(tmp_path / "damaged")


def test_attention_moves_to_where_later_versions_keep_it(tmp_path: Path) -> None:
    model = blocks()
    core = model[0].self_attention.core_attention
    core.history.scale.fill_(3.0)
    torch.save(export_te_state_dict(model, "1.7"), tmp_path / "te.pt")
    main(["checkpoint", "convert", str(tmp_path / "te.pt"), str(tmp_path / "ours.pt")])
    state = torch.load(tmp_path / "ours.pt", weights_only=True)["FP8Precision"]["model"]
    assert state["scale"][state["names"].index("0.self_attention.core_attention.qkv")] == 3.0


class Odd:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "damaged|not written by torch.save"),
        ({"0._extra_state": b"garbage"}, r"0\._extra_state: .*damaged"),
        ({"w": torch.ones(1)}, "nothing to convert"),
        ({"0._extra_state": None, "odd": Odd()}, r"an object of .*Odd"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(SystemExit, match=message):
        main(["checkpoint", "convert", str(path), str(tmp_path / "out.pt")])
    assert [file.name for file in tmp_path.iterdir()] == ["in.pt"]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_bytes(b"precious")
    torch.save({"0._extra_state": None}, tmp_path / "in.pt")
    with pytest.raises(SystemExit, match="exists"):
        main(["checkpoint", "convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")])
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    with pytest.raises(SystemExit, match="No such file"):
        main(["checkpoint", "inspect", str(tmp_path / "missing.pt")])


@pytest.mark.parametrize("version", ["1.13", "2.4"])
def test_five_hundred_modules_with_full_histories(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(*(Linear(16, 16) for _ in range(500)))
    for module in model:
        history = AmaxHistory(module.history_slots())
        history.resize(1024)
        history.scale.fill_(7.0)
        module.use_history(history)
    torch.save({"state_dict": export_te_state_dict(model, version)}, tmp_path / "big.ckpt")
    main(["checkpoint", "inspect", str(tmp_path / "big.ckpt")])
    main(["checkpoint", "convert", str(tmp_path / "big.ckpt"), str(tmp_path / "ours.ckpt")])
    assert len(capsys.readouterr().out.splitlines()) == 2 + 1500 + 1


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(3), "a._extra_state": pickle.dumps(None)}}, tmp_path / "whole.ckpt")
    whole = (tmp_path / "whole.ckpt").read_bytes()
    assert "a._extra_state" in inspect(tmp_path / "whole.ckpt")
    for length in range(len(whole)):
        (tmp_path / "cut.ckpt").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            inspect(tmp_path / "cut.ckpt")
