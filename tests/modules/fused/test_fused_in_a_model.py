"""Fused modules in a model: the table, its policy and what ran; rows, files of Transformer Engine, resuming."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import (
    FP8Callback,
    FP8Precision,
    LayerNormLinear,
    LayerNormMLP,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    fp8_state_dict,
    load_te_state_dict,
    update_fp8_scales,
)
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.modules.state import fp8_modules
from tests.checkpoint.te_models import random_columns, te_files
from tests.checkpoint.te_writer import VERSIONS
from tests.small import quiet_trainer

ROLES = ("input", "weight", "grad_output")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = LayerNormLinear(16, 32)
        self.down = nn.Linear(32, 16)
        self.mlp = LayerNormMLP(16, 24, activation="swiglu", normalization="RMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x))
        return x + self.mlp(x)


def blocks(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


SHAPES = {"up": (32, 16), "down": (16, 32), "mlp.fc1": (48, 16), "mlp.fc2": (16, 24)}


def test_the_table_has_every_matrix_and_the_policy_holds() -> None:
    model = blocks()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    summary = plan_conversion(model, Policy()).summary
    assert {layer.name: layer.shape for layer in summary.layers} == {
        f"{block}.{name}": shape for block in range(3) for name, shape in SHAPES.items()
    }
    assert [layer.name for layer in summary.layers if layer.fp8] == [f"1.{name}" for name in SHAPES]
    assert summary.share_of_parameters == pytest.approx(1 / 3)
    convert_module(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [name for name, module in fp8_modules(model) if module.fp8] == ["1.up", "1.down", "1.mlp"]
    rows = [f"1.{name}.{role}" for name in SHAPES for role in ROLES]
    assert model[1].up.history.names == rows
    assert model[1].up.history is model[1].down.history is model[1].mlp.history
    with fp8_autocast():
        model(torch.randn(4, 16)).sum().backward()
    assert bool((model[1].mlp.history.amax > 0).all())
    assert [model[index].mlp.record.fp8 for index in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("glob", ["*.mlp", "*.fc1", "*.mlp.fc2", "1.mlp*"])
def test_a_glob_of_one_product_keeps_the_module(glob: str) -> None:
    model = blocks()
    policy = Policy(skip=[glob])
    plan = plan_conversion(model, policy)
    assert [layer.name for layer in plan.summary.layers if layer.fp8] == ["1.up", "1.down"]
    assert plan.wrong_globs == ()
    assert "1.mlp" in plan_conversion(model, Policy(skip=["1.mpl"])).wrong_globs[0]
    apply_conversion(model, plan)
    assert not model[1].mlp.fp8
    assert model[1].up.history.names == [f"1.{name}.{role}" for name in ("up", "down") for role in ROLES]


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_that_torch_counts(frozen: bool) -> None:
    """Torch counts a model in high precision. What is behind a norm that trains has a gradient."""
    model, x = blocks(2), torch.randn(6, 16)
    if frozen:
        model.requires_grad_(False)
        model[1].mlp.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward(torch.ones(6, 16))
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        model(x).backward(torch.ones(6, 16))
    found = watched.finish()
    assert found.flops == counter.get_total_flops()
    assert all(layer.ran for layer in found.layers)
    assert found.share_of_flops == 1.0


class Fitted(L.LightningModule):
    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.net, self.idle = blocks(), idle
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.net:
            x = block.down(block.up(x)) if self.idle else block(x)
        loss = x.square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(model: Fitted, epochs: int, ckpt_path: Path | None = None) -> tuple[L.Trainer, FP8Precision]:
    plugin = FP8Precision("delayed", weights_dtype=torch.float32)
    trainer = quiet_trainer(plugins=[plugin], callbacks=[FP8Callback()], max_epochs=epochs)
    data = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data, 4), ckpt_path=ckpt_path)
    return trainer, plugin


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = Fitted()
    fit(whole, 2)
    half, again = Fitted(), Fitted()
    trainer, _ = fit(half, 1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(again, 2, tmp_path / "half.ckpt")
    assert half.losses + again.losses == whole.losses
    assert "1.mlp.fc2.grad_output" in str(torch.load(tmp_path / "half.ckpt", weights_only=True)["FP8Precision"])


def test_the_plugin_names_a_module_that_did_not_run() -> None:
    _, plugin = fit(Fitted(idle=True), 1)
    assert plugin.summary is not None
    assert {layer.name for layer in plugin.summary.idle} == {"net.1.mlp.fc1", "net.1.mlp.fc2"}
    assert plugin.summary.num_fp8 == 2


# Files of Transformer Engine.

OWNERS = {"0.up": 1, "0.mlp": 2, "1.up": 1, "1.mlp": 2}
COLUMNS = {"input": ("fwd", 0, 3), "weight": ("fwd", 1, 3), "grad_output": ("bwd", 0, 2)}


def assert_holds(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Rows have the columns that Transformer Engine gives each GEMM: three forward, two backward."""
    state = fp8_state_dict(model)
    rows = {name: index for index, name in enumerate(state["names"])}
    for owner, columns in states.items():
        gemms = len(columns[0]) // 3
        for gemm in range(gemms):
            for role, (direction, first, slots) in COLUMNS.items():
                row = rows[f"{owner}.fc{gemm + 1}.{role}" if gemms == 2 else f"{owner}.{role}"]
                scale, amax_history = columns[:2] if direction == "fwd" else columns[2:]
                assert state["scale"][row] == scale[first + gemm * slots]
                assert torch.equal(state["amax_history"][:, row], amax_history[:, first + gemm * slots])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """States and the state dict of every version."""
    parameters = blocks(2).state_dict()
    states = {owner: random_columns(gemms, 8, seed) for seed, (owner, gemms) in enumerate(OWNERS.items())}
    specs = [{"version": version, "parameters": parameters, "states": states, "attention": []} for version in VERSIONS]
    return {
        spec["version"]: (states, file) for spec, file in zip(specs, te_files(specs, tmp_path_factory.mktemp("te")))
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("converted", [False, True])
def test_files_of_transformer_engine_load_and_come_back(version: str, converted: bool, files: Any) -> None:
    states, file = files[version]
    model = blocks(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if converted:
        convert_module(model, first_last_layers_bf16=False)
        report = load_te_state_dict(model, file)
        assert {entry.outcome for entry in report.entries if "down" not in str(entry)} == {"loaded"}, str(report)
    else:
        model.load_state_dict(file)
    assert_holds(model, states)
    assert all(torch.equal(value, file[name]) for name, value in model.state_dict().items())
    again = blocks(2)
    load_te_state_dict(again, export_te_state_dict(model, version))
    assert_holds(again, states)


def test_a_state_of_another_module_is_told() -> None:
    """A Linear's state has too few columns for two GEMMs."""
    model = nn.ModuleDict({"up": LayerNormLinear(16, 32), "mlp": LayerNormMLP(16, 24)})
    state = export_te_state_dict(model, "2.4")
    columns = fp8_state_dict(model)
    with fp8_autocast():
        model["mlp"](model["up"](torch.randn(4, 16))[:, :16]).sum().backward()
    update_fp8_scales(model)
    state = export_te_state_dict(model, "2.4")
    wrong = {**state, "mlp._extra_state": state["up._extra_state"]}
    with pytest.raises(RuntimeError, match=r"mlp\._extra_state: its FP8 state has no column"):
        model.load_state_dict(wrong)
    report = load_te_state_dict(model, wrong)
    assert "LayerNormMLP has no slots for its 1 GEMMs" in str(report)
    assert len(columns["names"]) == 9


def test_split_parameters_both_ways() -> None:
    whole = nn.ModuleDict({"qkv": LayerNormLinear(16, 48)})
    split = nn.ModuleDict({"qkv": LayerNormLinear(16, 48, parameters_split=("query_", "key_", "value_"))})
    load_te_state_dict(split, whole.state_dict())
    parts = [getattr(split["qkv"], f"{name}_weight") for name in ("query", "key", "value")]
    assert torch.equal(torch.cat(parts), whole["qkv"].weight)
    again = nn.ModuleDict({"qkv": LayerNormLinear(16, 48)})
    load_te_state_dict(again, split.state_dict())
    assert torch.equal(again["qkv"].weight, whole["qkv"].weight)
