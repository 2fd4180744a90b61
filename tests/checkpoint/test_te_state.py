"""Transformer Engine's checkpoints, every layout: scales and histories come back exactly, or default where told."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    DelayedScaling,
    LayerNorm,
    LayerNormLinear,
    Linear,
    convert_module,
    fp8_state_dict,
    load_te_state_dict,
)
from lightning_fp8.delayed.update import reduce_and_update
from lightning_fp8.te.torch_file import CheckpointError
from tests.checkpoint.te_models import (
    Block,
    assert_rows,
    blocks,
    expected_rows,
    random_columns,
    spec,
    te_files,
)
from tests.checkpoint.te_writer import VERSIONS

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
    with pytest.raises(
        CheckpointError, match="the file lacks 0.fc.bias; the model lacks loss.weight, metric.total; strict=False loads"
    ):
        load_te_state_dict(model, file)
    report = load_te_state_dict(model, file, strict=False)
    assert_rows(model, expected_rows(written["states"]))
    for name, value in model.state_dict().items():
        if "_extra_state" not in name:
            assert torch.equal(value, unchanged if name == "0.fc.bias" else written["parameters"][name]), name
    assert report.missing_keys == ("0.fc.bias",)
    assert report.unexpected_keys == ("loss.weight", "metric.total")
    assert "not in the file, and as they were: 0.fc.bias\n  not in the model: loss.weight, metric.total" in str(report)


def test_a_name_beside_the_model_is_not_taken_for_one_inside(files: Any) -> None:
    """A LightningModule's own ``0.fc.weight``, of the shape of ``model.0.fc.weight``, first in the file or last."""
    written, state_dict = files["2.18"]
    inside = {f"model.{key}": value for key, value in state_dict.items()}
    beside = {"0.fc.weight": torch.full_like(state_dict["0.fc.weight"], 7.0)}
    for file in (beside | inside, inside | beside):
        model = blocks()
        with pytest.raises(
            CheckpointError, match="outside the part of the file that is the model's: 0.fc.weight; strict"
        ):
            load_te_state_dict(model, file)
        report = load_te_state_dict(model, file, strict=False)
        assert (report.missing_keys, report.unexpected_keys) == ((), ("0.fc.weight",))
        assert torch.equal(model.state_dict()["0.fc.weight"], written["parameters"]["0.fc.weight"])
        assert_rows(model, expected_rows(written["states"]))


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


@pytest.mark.parametrize("length", [3, 12])
def test_a_history_of_another_length_keeps_its_newest_amaxes(length: int, files: Any) -> None:
    written, state_dict = files["1.12"]
    model = blocks()
    load_te_state_dict(model, state_dict)
    history = model[0].fc.history
    history.amax.fill_(1.0)
    reduce_and_update({history: DelayedScaling(amax_history_len=length)})
    saved = written["states"]["0.fc"][1][:, 0]
    row = history.names.index("input")
    kept = min(length - 2, 8)  # between the empty first row and the step that has just been
    assert history.amax_history[:, row].tolist() == [0.0] * (length - 1 - kept) + saved[8 - kept :].tolist() + [1.0]


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
    ("given", "message"),
    [
        ([1.0], "is a list in the file and a tensor in the model"),
        (None, "is a NoneType in the file"),
        (torch.empty(8, 8, device="meta"), "is on meta, without values, in the file and not in the model"),
        (torch.ones(8, 8).to_sparse(), "has layout torch.sparse_coo in the file and torch.strided in the model"),
        (torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8), "is quantized in the file"),
        (torch.ones(8, 8, dtype=torch.complex64), "is torch.complex64 in the file and torch.float32 in the model"),
        (torch.ones(8, 8, dtype=torch.int64), "is torch.int64 in the file and torch.float32 in the model"),
    ],
    ids=["list", "None", "meta", "sparse", "quantized", "complex", "int64"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_value_that_torch_cannot_copy_changes_nothing(given: Any, message: str, strict: bool) -> None:
    model = nn.Sequential(Linear(8, 8), Linear(8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    file = {name: value + 1 for name, value in before.items()} | {"1.weight": given, "0._extra_state": None}
    with pytest.raises(CheckpointError, match=rf"1\.weight {message}"):
        load_te_state_dict(model, file, strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_state_of_few_bytes_that_claims_many() -> None:
    linear = Linear(16, 16)
    seen_often = torch.frombuffer(bytearray(b"("), dtype=torch.uint8).expand(1 << 40)
    with pytest.raises(CheckpointError, match=r"_extra_state: it has shape \(1099511627776,\) and 1 stored values"):
        load_te_state_dict(linear, {**linear.state_dict(), "_extra_state": seen_often})
    state = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(1, 1).expand(1 << 20, 3)}
    with pytest.raises(CheckpointError, match=r"amax_history_fwd has shape \(1048576, 3\) and 1 stored values"):
        load_te_state_dict(linear, {**linear.state_dict(), "_extra_state": state})


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(("value", "suspect"), [(0.0, True), (1.0, False)])
def test_gamma_that_may_be_centered_at_zero_is_noted(ours: bool, value: float, suspect: bool) -> None:
    weight = torch.randn(8) * 0.1 + value
    file = {"p.layer_norm_weight": weight, "p.layer_norm_bias": torch.zeros(8), "p._extra_state": None}
    file |= {"p.weight": torch.randn(8, 8), "p.bias": torch.zeros(8)}

    def model(zero_centered_gamma: bool) -> nn.Module:
        inside = LayerNormLinear(8, 8, zero_centered_gamma=zero_centered_gamma)
        norm = LayerNorm(8, zero_centered_gamma=zero_centered_gamma)
        return nn.ModuleDict({"p": inside if ours else nn.Sequential(norm, nn.Linear(8, 8))})

    report = load_te_state_dict(model(False), file)
    name = "p.layer_norm_weight" if ours else "p.0.weight"
    assert (f"nearer to 0 than to 1 on average: {name};" in str(report)) == suspect
    assert "nearer" not in str(load_te_state_dict(model(True), file))


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
        ({"scale_fwd": io.BytesIO(b"a buffer in a buffer")}, "it asks for '_io.BytesIO'"),
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
