"""Forms of Transformer Engine's FP8 states of a layer, and names of parameters."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import Linear, fp8_autocast, fp8_state_dict, load_te_state_dict
from lightning_fp8.numerics.scaled import LINEAR_ROLES
from lightning_fp8.te.te_state import read_te_state
from lightning_fp8.te.torch_file import CheckpointError
from lightning_fp8.te_checkpoints.remap import remap, states_by_name
from tests.checkpoint.te_models import (
    assert_rows,
    expected_rows,
    random_columns,
)


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
    with pytest.raises(CheckpointError, match=r"the model lacks qkv\.bias, qkv\.weight"):
        load_te_state_dict(model, {"qkv.weight": torch.randn(48, 16), "qkv.bias": torch.randn(48)})
