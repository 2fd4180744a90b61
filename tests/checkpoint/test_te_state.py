"""Transformer Engine's checkpoints, every layout: scales and histories come back exactly, or default where told."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from examples import resume_te_checkpoint
from lightning_fp8 import DelayedScaling, Linear, convert_module, fp8_autocast, fp8_state_dict, load_te_state_dict
from lightning_fp8.checkpoint.remap import remap, states_by_name
from lightning_fp8.delayed.reduce_and_update import reduce_and_update
from lightning_fp8.scaled import LINEAR_ROLES
from lightning_fp8.te.te_state import read_te_state
from lightning_fp8.te.unpickle import CheckpointError
from tests.checkpoint.te_models import (
    Block,
    assert_rows,
    blocks,
    expected_rows,
    lightning_checkpoints,
    random_columns,
    spec,
    te_files,
)
from tests.checkpoint.te_writer import VERSIONS
from tests.small import Regression, fp8_trainer, regression_data

MODULES = [f"{block}.{name}" for block in (0, 1) for name in ("self_attention.qkv", "self_attention.proj", "fc")]
ATTENTIONS = [f"{block}.self_attention.core_attention" for block in (0, 1)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Specification and state dict of every version."""
    torch.manual_seed(0)
    specs = [spec(version, blocks().state_dict(), MODULES + ATTENTIONS) for version in VERSIONS]
    return dict(zip(VERSIONS, zip(specs, te_files(specs, tmp_path_factory.mktemp("te")))))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["ours", "converted", "module's own load_state_dict"])
def test_the_whole_table(version: str, kind: str, files: Any) -> None:
    written, state_dict = files[version]
    model = blocks(nn.Linear if kind == "converted" else Linear)
    convert_module(model, first_last_layers_bf16=False)
    if kind.startswith("module"):
        model.load_state_dict(state_dict, strict=True)
    else:
        report = load_te_state_dict(model, state_dict)
        moved = ATTENTIONS if version in ("1.6", "1.7") else []
        assert [entry.key for entry in report.with_outcome("remapped")] == [
            f"{name}.fused_attention._extra_state" for name in moved
        ]
        assert [entry.key for entry in report.with_outcome("defaulted")] == (ATTENTIONS if version == "1.5" else [])
        assert not report.with_outcome("ignored")
    assert_rows(model, expected_rows(written["states"], attention=version != "1.5"))
    assert all(torch.equal(value, written["parameters"][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "prefix", ["module.", "model.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod.", "net.model."]
)
def test_prefixes_of_wrappers(prefix: str, files: Any) -> None:
    written, state_dict = files["1.7"]
    model = blocks()
    load_te_state_dict(model, {f"{prefix}{key}": value for key, value in state_dict.items()})
    assert_rows(model, expected_rows(written["states"]))


def test_names_beside_the_model_do_not_hide_its_prefix(files: Any) -> None:
    """A loss's buffer and a metric's, as a LightningModule that holds a model has them, beside ``model.``."""
    written, state_dict = files["2.18"]
    beside = {"loss.weight": torch.ones(3), "metric.total": torch.zeros(())}
    file = beside | {f"model.{key}": value for key, value in state_dict.items() if key != "0.fc.bias"}
    model = blocks()
    unchanged = model[0].fc.bias.detach().clone()
    with pytest.raises(CheckpointError, match="lacks 0.fc.bias; the model lacks loss.weight; the model lacks metric"):
        load_te_state_dict(model, file)
    report = load_te_state_dict(model, file, strict=False)
    assert_rows(model, expected_rows(written["states"]))
    for name, value in model.state_dict().items():
        if "_extra_state" not in name:
            assert torch.equal(value, unchanged if name == "0.fc.bias" else written["parameters"][name]), name
    assert report.missing_keys == ("0.fc.bias",)
    assert report.unexpected_keys == ("loss.weight", "metric.total")
    assert "not in the file, and as they were: 0.fc.bias\n  not in the model: loss.weight, metric.total" in str(report)


def test_into_a_model_inside_a_model_and_a_compiled_one(files: Any) -> None:
    written, state_dict = files["2.18"]
    outer = nn.ModuleDict({"model": blocks()})
    load_te_state_dict(outer, {"state_dict": state_dict})
    assert_rows(outer["model"], expected_rows(written["states"]))
    compiled = torch.compile(blocks())
    load_te_state_dict(compiled, state_dict)
    assert_rows(compiled, expected_rows(written["states"]))


def test_a_file_that_mixes_layouts_is_read_module_by_module(files: Any) -> None:
    (old_spec, old), (new_spec, new) = files["1.7"], files["2.18"]
    mixed = {key: value for key, value in old.items() if key.startswith("0.")}
    mixed |= {key: value for key, value in new.items() if key.startswith("1.")}
    states = {name: (old_spec if name.startswith("0.") else new_spec)["states"][name] for name in old_spec["states"]}
    model = blocks()
    report = load_te_state_dict(model, mixed)
    assert_rows(model, expected_rows(states))
    assert report.writers == ("1.6 to 1.7", "2.0 or later")

    both = new | {key: value for key, value in old.items() if "fused_attention" in key}
    report = load_te_state_dict(model, both)
    assert_rows(model, expected_rows(new_spec["states"]))
    assert len(report.with_outcome("ignored")) == 2


def test_an_attention_module_by_another_name(files: Any) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Block().self_attention.core_attention

    written, state_dict = files["1.6"]
    value = state_dict["0.self_attention.core_attention.fused_attention._extra_state"]
    model = Renamed()
    load_te_state_dict(model, {"attn.fused_attention._extra_state": value})
    name = "0.self_attention.core_attention"
    rows = expected_rows({name: written["states"][name]})
    assert_rows(model, {key.replace(name, "attn"): row for key, row in rows.items()})


def te_linear(columns: Any) -> Tensor:
    names = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
    state = dict(zip(names, columns)) | {"scale_inv_fwd": 1 / columns[0], "extra_fp8_variables": {"num_gemms": 1}}
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [None, torch.empty(0, dtype=torch.uint8), torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)]
    + [pickle.dumps(None)],
)
def test_forms_without_fp8_state(value: Any) -> None:
    assert read_te_state(value).forward is None
    linear = Linear(16, 16)
    linear.load_state_dict({**linear.state_dict(), "_extra_state": value}, strict=True)
    assert fp8_state_dict(linear)["scale"].tolist() == [0, 0, 0]


def test_older_containers() -> None:
    columns = random_columns(1, 4, seed=3)
    names = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
    as_dict, as_list = dict(zip(names, columns)), [*columns, {}, 1, 2, 3, 4, 5]
    operations = {
        "forward": {"scale_fwd": columns[0][:2], "amax_history_fwd": columns[1][:, :2], "extra_fp8_variables": {}},
        "backward": {"scale_bwd": columns[2][:1], "amax_history_bwd": columns[3][:, :1], "extra_fp8_variables": {}},
    }
    for value in (as_dict, as_list, te_linear(columns), bytes(te_linear(columns)), pickle.dumps(operations)):
        linear = Linear(16, 16)
        linear.load_state_dict({**linear.state_dict(), "_extra_state": value})
        assert_rows(linear, {name.lstrip("."): row for name, row in expected_rows({"": columns}).items()})


def test_a_layer_without_rows_yet_takes_a_state() -> None:
    columns = random_columns(1, 4, seed=3)
    linear = Linear(16, 16)
    linear._slots = None  # as an nn.Linear has none that was retyped by hand
    linear.load_state_dict({**linear.state_dict(), "_extra_state": te_linear(columns)})
    assert_rows(linear, {name.lstrip("."): row for name, row in expected_rows({"": columns}).items()})


def test_a_layer_without_rows_yet_is_calibrated() -> None:
    linear = Linear(16, 16)
    linear._slots = None
    with fp8_autocast(enabled=False, calibrating=True):
        linear(torch.full((4, 16), -3.0)).backward(torch.full((4, 16), 0.5))
    amaxes = fp8_state_dict(linear)["amax_history"].amax(0)
    assert amaxes.tolist() == [3.0, linear.weight.abs().max().item(), 0.5]


def test_of_two_states_the_newer_is_taken_and_said() -> None:
    newer, older = random_columns(1, 4, seed=3), random_columns(1, 4, seed=4)
    linear = Linear(16, 16)
    state_dict = {"fused_attention._extra_state": te_linear(older), "_extra_state": te_linear(newer)}
    with pytest.warns(UserWarning, match=r"^fused_attention\._extra_state of an older .*: _extra_state is newer"):
        linear.load_state_dict({**linear.state_dict(), **state_dict})
    assert_rows(linear, {name.lstrip("."): row for name, row in expected_rows({"": newer}).items()})


def test_transformer_engines_default_row_counts_as_no_state_yet() -> None:
    columns = (torch.ones(3), torch.zeros(4, 3), torch.ones(2), torch.zeros(4, 2))
    linear = Linear(16, 16)
    linear.load_state_dict({**linear.state_dict(), "_extra_state": te_linear(columns)})
    assert fp8_state_dict(linear)["scale"].tolist() == [0, 0, 0]


def test_an_overflow_in_the_file_does_not_freeze_the_scale() -> None:
    columns = random_columns(1, 4, seed=3)
    columns[1][2, 0] = float("inf")
    model = nn.Sequential(Linear(16, 16))
    report = load_te_state_dict(
        model, {f"0.{k}": v for k, v in model[0].state_dict().items()} | {"0._extra_state": te_linear(columns)}
    )
    assert fp8_state_dict(model)["amax_history"][2, 0] == 0
    assert "1 infinite or NaN amaxes dropped" in report.entries[0].reason


@pytest.mark.parametrize("length", [3, 12])
def test_a_history_of_another_length_keeps_its_newest_amaxes(length: int, files: Any) -> None:
    written, state_dict = files["1.12"]
    model = blocks()
    load_te_state_dict(model, state_dict)
    history = model[0].fc.history
    history.amax.fill_(1.0)
    reduce_and_update([history], DelayedScaling(amax_history_len=length))
    saved = written["states"]["0.fc"][1][:, 0]
    row = history.names.index("input")
    kept = min(length - 2, 8)  # between the empty first row and the step that has just been
    assert history.amax_history[:, row].tolist() == [0.0] * (length - 1 - kept) + saved[8 - kept :].tolist() + [1.0]


# Names of parameters.


class LayerNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), Linear(16, 48)


class LayerNormMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.RMSNorm(16), Linear(16, 32), nn.GELU(), Linear(32, 16)


def test_fused_modules_go_to_the_norm_and_the_linears_inside() -> None:
    model = nn.ModuleDict({"qkv": LayerNormLinear(), "mlp": LayerNormMLP()})
    one, two = random_columns(1, 4, seed=1), random_columns(2, 4, seed=2)
    te = {
        "qkv.layer_norm_weight": torch.randn(16),
        "qkv.layer_norm_bias": torch.randn(16),
        "qkv.weight": torch.randn(48, 16),
        "qkv.bias": torch.randn(48),
        "qkv._extra_state": te_linear(one),
        "mlp.layer_norm_weight": torch.randn(16),
        "mlp.fc1_weight": torch.randn(32, 16),
        "mlp.fc1_bias": torch.randn(32),
        "mlp.fc2_weight": torch.randn(16, 32),
        "mlp.fc2_bias": torch.randn(16),
        "mlp._extra_state": te_linear(two),
    }
    load_te_state_dict(model, te)
    state = model.state_dict()
    for ours, theirs in {
        **{"qkv.norm.weight": "qkv.layer_norm_weight", "qkv.norm.bias": "qkv.layer_norm_bias"},
        **{
            "qkv.linear.weight": "qkv.weight",
            "qkv.linear.bias": "qkv.bias",
            "mlp.norm.weight": "mlp.layer_norm_weight",
        },
        **{"mlp.up.weight": "mlp.fc1_weight", "mlp.up.bias": "mlp.fc1_bias"},
        **{"mlp.down.weight": "mlp.fc2_weight", "mlp.down.bias": "mlp.fc2_bias"},
    }.items():
        assert torch.equal(state[ours], te[theirs]), ours
    second = (two[0][3:], two[1][:, 3:], two[2][2:], two[3][:, 2:])
    assert_rows(model, expected_rows({"qkv.linear": one, "mlp.up": two, "mlp.down": second}))


def test_grouped_linears_are_not_mistaken_for_a_layer_norm_mlp() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList([Linear(16, 16), Linear(16, 16)])})
    te = {f"experts.weight{index}": torch.randn(16, 16) for index in range(2)}
    state = {"experts._extra_state": te_linear(random_columns(2, 4, seed=1))}
    remapped = remap({**te, **state}, model, {"experts.0": LINEAR_ROLES, "experts.1": LINEAR_ROLES})
    assert remapped.fp8_state is None
    assert [entry.reason for entry in remapped.report.with_outcome("ignored")] == [
        "GroupedLinear's states are not read"
    ]
    assert states_by_name({**te, **state})[1:] == (None, 0)


def test_split_parameters_both_ways() -> None:
    split = nn.ModuleDict({"qkv": Linear(16, 48, parameters_split=("query", "key", "value"))})
    fused = nn.ModuleDict({"qkv": Linear(16, 48)})
    columns = random_columns(1, 4, seed=1)
    load_te_state_dict(fused, {**split.state_dict(), "qkv._extra_state": te_linear(columns)})
    parts = [split.state_dict()[f"qkv.{name}_weight"] for name in ("query", "key", "value")]
    assert torch.equal(fused["qkv"].weight, torch.cat(parts))
    again = nn.ModuleDict({"qkv": Linear(16, 48, parameters_split=("query", "key", "value"))})
    load_te_state_dict(again, {**fused.state_dict(), "qkv._extra_state": te_linear(columns)})
    assert all(torch.equal(value, split.state_dict()[key]) for key, value in again.state_dict().items())
    for model in (fused, again):
        assert_rows(model, expected_rows({"qkv": columns}))


def test_fused_rows_are_not_cut_apart_by_guess() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = Linear(16, 16), Linear(16, 16), Linear(16, 16)

    model = nn.ModuleDict({"qkv": Projections()})
    with pytest.raises(CheckpointError, match=r"the model lacks qkv\.weight"):
        load_te_state_dict(model, {"qkv.weight": torch.randn(48, 16), "qkv.bias": torch.randn(48)})


# All or nothing.


def damaged(state_dict: dict[str, Any], how: str) -> dict[str, Any]:
    key = next(key for key in reversed(state_dict) if key.endswith("fc._extra_state"))
    value = state_dict[key]
    raw = value.getvalue() if isinstance(value, io.BytesIO) else bytes(value)
    if how == "truncated":
        return state_dict | {key: io.BytesIO(raw[: len(raw) // 2])}
    if how == "foreign":
        return state_dict | {key: torch.frombuffer(bytearray(pickle.dumps({"recipe": print})), dtype=torch.uint8)}
    return state_dict | {"1.fc.weight": torch.zeros(3, 3)}


@pytest.mark.parametrize("version", ["1.7", "2.18"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"1\.fc\._extra_state: .*damaged"),
        ("foreign", r"1\.fc\._extra_state: .*'builtins\.print'"),
        ("shape", r"1\.fc\.weight has shape \(3, 3\) in the file and \(16, 16\)"),
    ],
)
def test_a_bad_file_changes_nothing(version: str, how: str, message: str, files: Any) -> None:
    model = blocks()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = fp8_state_dict(model)
    with pytest.raises(CheckpointError, match=message):
        load_te_state_dict(model, damaged(files[version][1], how))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    after = fp8_state_dict(model)
    assert torch.equal(after["scale"], before["scale"])
    assert torch.equal(after["amax_history"], before["amax_history"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_fwd": torch.ones(3, dtype=torch.float64)}, "scale_fwd is torch.float64"),
        ({"scale_fwd": torch.tensor([1.0, -1, 1])}, "scale_fwd holds zero, negative"),
        ({"scale_fwd": torch.tensor([1.0, float("nan"), 1])}, "scale_fwd holds zero, negative, infinite or NaN"),
        ({"amax_history_fwd": torch.ones(4, 2)}, r"shape \(4, 2\) for 3 values"),
        ({"amax_history_fwd": torch.ones(4)}, "must have 2 dimensions"),
        ({"amax_history_fwd": -torch.ones(4, 3)}, "negative"),
        ({"amax_history_fwd": torch.ones(1).expand(4, 3)}, "1 stored values"),
        ({"scale_fwd": 3}, "scale_fwd is int"),
        ({"scale_fwd": io.BytesIO(b"a buffer in a buffer")}, "scale_fwd is Buffer"),
        ({"scale_bwd": torch.ones(0), "amax_history_bwd": torch.ones(4, 0)}, "no column for 'grad_output'"),
    ],
)
def test_values_that_are_no_state(change: dict[str, Any], message: str) -> None:
    columns = random_columns(1, 4, seed=3)
    state = dict(zip(("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"), columns)) | change
    linear = Linear(16, 16)
    before = fp8_state_dict(linear)["scale"]
    with pytest.raises(CheckpointError, match=message):
        load_te_state_dict(linear, {**linear.state_dict(), "_extra_state": pickle.dumps(state)})
    with pytest.raises(RuntimeError, match=message):
        linear.load_state_dict({**linear.state_dict(), "_extra_state": pickle.dumps(state)})
    assert torch.equal(fp8_state_dict(linear)["scale"], before)


def test_a_modules_own_extra_state_is_its_own_business(files: Any) -> None:
    class Counter(nn.Module):
        value = 0

        def get_extra_state(self) -> Any:
            return {"count": self.value}

        def set_extra_state(self, state: Any) -> None:
            self.value = state["count"]

    model = nn.ModuleDict({"net": blocks(), "counter": Counter()})
    state_dict = {f"net.{key}": value for key, value in files["1.7"][1].items()}
    load_te_state_dict(model, {**state_dict, "counter._extra_state": {"count": 5}})
    assert model["counter"].value == 5
    assert_rows(model["net"], expected_rows(files["1.7"][0]["states"]))


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
