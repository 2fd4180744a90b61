"""``lightning-fp8 checkpoint``: what a file holds, and the same file for everybody."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    FP8FabricPrecision,
    Linear,
    convert_module,
    export_te_state_dict,
    fp8_state_dict,
    load_te_state_dict,
)
from lightning_fp8.cli.checkpoint import convert, inspect
from lightning_fp8.cli.main import main
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.te.torch_file import CheckpointError
from tests.checkpoint.te_models import blocks, expected_rows, lightning_checkpoints
from tests.small import Regression, fp8_trainer, mlp, regression_data
from tests.tiers import thorough


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


def test_inspect_prints_the_stalest_scales_and_those_of_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = convert_module(mlp(depth=5))
    state = fp8_state_dict(model)
    n = len(state["names"])
    newest = torch.arange(1.0, n + 1)  # the first is 8 times below its history, the last 8 / n
    state["amax_history"] = torch.stack([torch.full((n,), 8.0), newest])
    state["scale"] = torch.ones(n)
    torch.save(state, tmp_path / "state.pt")
    main(["checkpoint", "inspect", str(tmp_path / "state.pt"), "--worst", "2"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == state["names"][:2]
    main(["checkpoint", "inspect", str(tmp_path / "state.pt"), "--filter", "*.weight"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == [name for name in state["names"] if name.endswith(".weight")]
    main(["checkpoint", "inspect", str(tmp_path / "state.pt"), "--filter", "none"])
    assert capsys.readouterr().out.strip().endswith("no FP8 state of tensors called none")
    with pytest.raises(SystemExit):
        main(["checkpoint", "inspect", str(tmp_path / "state.pt"), "--worst", "0"])
    assert "'0' is not a number of at least 1" in capsys.readouterr().err


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
        (b"hello", "it is not a file of torch.save; .* torch.save its state dict"),
        ({"0._extra_state": b"garbage"}, r"0\._extra_state: .*damaged"),
        ({"w": torch.ones(1)}, "no Transformer Engine state to convert"),
        ({"0._extra_state": None, "odd": Odd()}, r"an object of .*Odd"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(SystemExit, match=message):
        main(["checkpoint", "convert", str(path), str(tmp_path / "out.pt")])
    assert [file.name for file in tmp_path.iterdir()] == ["in.pt"]


def test_weights_whose_bytes_have_changed_are_not_converted(tmp_path: Path) -> None:
    weight = torch.arange(64.0)
    torch.save({"weight": weight, **states(2.0)}, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    stored = weight.numpy().tobytes()
    assert data.count(stored) == 1
    (tmp_path / "file").write_bytes(data.replace(stored, b"\1" + stored[1:]))
    with pytest.raises(CheckpointError, match=r"data/0' is damaged: its checksum differs"):
        convert(tmp_path / "file", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_bytes(b"precious")
    torch.save({"0._extra_state": None}, tmp_path / "in.pt")
    with pytest.raises(SystemExit, match="exists"):
        main(["checkpoint", "convert", str(tmp_path / "in.pt"), str(tmp_path / "out.pt")])
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    with pytest.raises(SystemExit, match="No such file"):
        main(["checkpoint", "inspect", str(tmp_path / "missing.pt")])


def converted(content: Any, folder: Path) -> tuple[Any, str]:
    """What ``convert`` makes of a file, as ``torch.load`` reads it, and what it says."""
    torch.save(content, folder / "in.pt")
    (folder / "out.pt").unlink(missing_ok=True)
    said = convert(str(folder / "in.pt"), str(folder / "out.pt"))
    return torch.load(folder / "out.pt", weights_only=True), said


def states(scale: float, version: str = "1.13") -> dict[str, Any]:
    """A file's state dict of one layer whose input has this scale."""
    linear = nn.Sequential(Linear(16, 16))
    linear[0].use_history(AmaxHistory(linear[0].history_slots()))
    linear[0].history.scale.fill_(scale)
    return export_te_state_dict(linear, version)


def test_both_state_dicts_of_weight_averaging_are_converted(tmp_path: Path) -> None:
    """The plugin's state is of the one that training goes on with."""
    file = {"state_dict": states(2.0), "current_model_state": states(3.0), "averaging_state": {"n_averaged": 1}}
    result, said = converted(file, tmp_path)
    assert result["state_dict"].keys() == result["current_model_state"].keys() == {"0.weight", "0.bias"}
    assert result["FP8Precision"]["model"]["scale"].tolist() == [3.0] * 3
    assert result["averaging_state"] == {"n_averaged": 1}
    assert "left" not in said
    printed = inspect(tmp_path / "in.pt").splitlines()[2:]
    assert [line.split()[:2] for line in printed if "input" in line] == [
        ["0.input", "2"],
        ["current_model_state.0.input", "3"],
    ]


@pytest.mark.parametrize("version", ["1.13", "2.4"])
def test_a_second_models_state_dict_is_left_and_named(version: str, tmp_path: Path) -> None:
    """Its states are written as they were read, and torch loads them."""
    result, said = converted({"net": states(2.0, version), "critic": states(3.0, version)}, tmp_path)
    assert said.endswith("; left as they were: those in critic")
    assert result["FP8Precision"]["model"]["scale"].tolist() == [2.0] * 3
    assert type(result["critic"]["0._extra_state"]) is type(states(3.0, version)["0._extra_state"])
    model = nn.Sequential(Linear(16, 16))
    load_te_state_dict(model, result["critic"])
    assert fp8_state_dict(model)["scale"].tolist() == [3.0] * 3


def test_plain_values_of_a_checkpoint_are_written_again(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5]).state_dict()
    values = {"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "set": {1, "two"}, "size": (1, 2)}
    values |= {"buffer": io.BytesIO(b"abc"), 7: torch.ones(2), "lr": scheduler}
    freqs = torch.polar(torch.ones(4), torch.arange(4.0))
    result, _ = converted({"state_dict": {**states(2.0), "freqs": freqs}, "plain": values}, tmp_path)
    assert torch.equal(result["state_dict"]["freqs"], freqs)
    plain = result["plain"]
    assert plain.pop("buffer").getvalue() == values.pop("buffer").getvalue()
    assert torch.equal(plain.pop(7), values.pop(7))
    assert plain == values
    assert list(plain["lr"]["milestones"].elements()) == [3, 3, 5]


@pytest.mark.parametrize("own", [{"count": 1}, [1, 2], torch.ones(2), "text", pickle.dumps({"count": 1})])
def test_another_modules_own_extra_state_is_passed_over(own: Any, tmp_path: Path) -> None:
    result, said = converted({"state_dict": {**states(2.0), "metric._extra_state": own}}, tmp_path)
    kept = result["state_dict"]["metric._extra_state"]
    assert torch.equal(kept, own) if isinstance(own, torch.Tensor) else kept == own
    assert said.startswith(f"{tmp_path / 'out.pt'}: 1 modules' states")
    assert "metric" not in inspect(tmp_path / "in.pt")
    torch.save({"state_dict": {"w": torch.ones(2), "metric._extra_state": own, 3: None}}, tmp_path / "own.pt")
    assert "own.pt: no FP8 state. The plugins save it in the checkpoints" in inspect(tmp_path / "own.pt")
    with pytest.raises(CheckpointError, match="no Transformer Engine state to convert"):
        convert(tmp_path / "own.pt", tmp_path / "new.pt")


def test_a_value_in_many_places_is_read_once(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(60):  # 2**60 paths lead to the innermost
        value = [value, value]
    torch.save({"FP8Precision": {"model": value}}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="must be a dictionary, not list"):
        inspect(tmp_path / "nested.pt")
    state = {"names": [], "scale": torch.ones(0), "amax_history": torch.ones(0, 0), "updates": value}
    torch.save({"FP8Precision": {"model": state}}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="'updates' must be a count"):
        inspect(tmp_path / "nested.pt")
    result, _ = converted({"state_dict": states(2.0), "nested": value}, tmp_path)
    assert result["nested"][0] is result["nested"][1]


def test_a_state_of_ours_that_claims_more_than_is_stored(tmp_path: Path) -> None:
    state = {"names": ["a"], "scale": torch.ones(1), "amax_history": torch.ones(1, 1).expand(1 << 40, 1), "updates": 0}
    torch.save({"FP8Precision": {"model": state}}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"'amax_history' has shape \(1099511627776, 1\) and 1 stored values"):
        inspect(tmp_path / "in.pt")


def test_a_target_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"0._extra_state": None}, tmp_path / "in.pt")
    (tmp_path / "link.pt").symlink_to("nowhere")
    source = str(tmp_path / "in.pt")
    with pytest.raises(SystemExit, match="exists"):
        main(["checkpoint", "convert", source, str(tmp_path / "link.pt")])
    with pytest.raises(SystemExit, match="missing is not a folder; create it first"):
        main(["checkpoint", "convert", source, str(tmp_path / "missing" / "out.pt")])

    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match=r"out.pt cannot be written: \[enforce fail"):
        main(["checkpoint", "convert", source, str(tmp_path / "out.pt")])
    assert {file.name for file in tmp_path.iterdir()} == {"in.pt", "link.pt"}


def test_an_empty_tensor_whose_strides_overflow(tmp_path: Path) -> None:
    """torch makes none of this shape, so the shape is edited in the file."""
    torch.save({"0._extra_state": None, "w": torch.ones(0, 3, 5)}, tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as source, zipfile.ZipFile(tmp_path / "big.pt", "w") as target:
        for info in source.infolist():
            huge = b"\x8a\x08" + (2**62).to_bytes(8, "little")
            data = source.read(info)
            target.writestr(info.filename, data.replace(b"K\x00K\x03K\x05\x87", b"K\x00" + huge + huge + b"\x87"))
    convert(tmp_path / "big.pt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["state_dict"]["w"].shape == (0, 2**62, 2**62)


@pytest.mark.parametrize("value", [None, b"garbage"])
def test_what_is_printed_of_a_file_does_not_steer_the_terminal(
    value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "\x1b]0;pwned\x07\x1b[2J\n\u202e\ud800é._extra_state"
    torch.save({key: value}, tmp_path / "in.pt")
    escaped = r"\x1b]0;pwned\x07\x1b[2J\n\u202e\ud800é._extra_state"
    if value is None:
        main(["checkpoint", "inspect", str(tmp_path / "in.pt")])
        assert capsys.readouterr().out.splitlines()[2].split()[0] == escaped
    else:
        with pytest.raises(SystemExit) as error:
            main(["checkpoint", "inspect", str(tmp_path / "in.pt")])
        assert escaped in str(error.value)
        assert str(error.value).isprintable()


@thorough
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


def test_files_that_are_no_checkpoint_are_named_with_the_way_out(tmp_path: Path) -> None:
    whole = tmp_path / "whole.ckpt"
    torch.save({"weight": torch.ones(1000)}, whole)
    (tmp_path / "cut.ckpt").write_bytes(whole.read_bytes()[:3000])
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "text.ckpt").write_text("hello, this is text")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "sharded").mkdir()
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "fp8_state.pt").touch()
    for name, said in {
        "cut.ckpt": "it ends too early, as after an interrupted copy or save; copy or save it again",
        "empty.ckpt": "it ends too early, as after an interrupted copy or save; copy or save it again",
        "text.ckpt": "it is not a file of torch.save",
        "config.json": "it is not a file of torch.save",
        "checkpoint-2": f"a folder; its FP8 state is in {tmp_path / 'checkpoint-2' / 'fp8_state.pt'}",
        "sharded": "a folder; a sharded one is made a file by python -m torch.distributed.checkpoint.format_utils",
    }.items():
        with pytest.raises(SystemExit, match=f"{name}: .*{said}"):
            main(["checkpoint", "inspect", str(tmp_path / name)])


def test_a_file_is_not_advised_to_be_removed_before_its_conversion(tmp_path: Path) -> None:
    path = tmp_path / "te.ckpt"
    torch.save({}, path)
    (tmp_path / "link.ckpt").symlink_to(path)
    for target in (path, tmp_path / "link.ckpt"):
        with pytest.raises(SystemExit, match="IN and OUT are the same file; name another file for OUT"):
            main(["checkpoint", "convert", str(path), str(target)])
