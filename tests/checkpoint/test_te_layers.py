"""State dicts of Transformer Engine's TransformerLayer, of every version and layout, in live layers of ours."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import (
    DelayedScaling,
    TransformerLayer,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    fp8_state_dict,
    load_te_state_dict,
    update_fp8_scales,
)
from tests.checkpoint.te_models import assert_rows, expected_rows, spec, te_files
from tests.checkpoint.te_writer import VERSIONS
from tests.small import fp8_trainer
from tests.tiers import thorough
from tests.transformer.layer_cases import draw

SPLIT = ("query_weight", "query_bias", "key_weight", "key_bias", "value_weight", "value_bias")
NORM = ("layer_norm_weight", "layer_norm_bias")
FUSED = ("weight", "bias")
MLP = (*NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")

LAYERS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]]]] = {
    "split": ({}, {"self_attention.layernorm_qkv": (*NORM, *SPLIT)}),
    "fused": ({"fuse_qkv_params": True}, {"self_attention.layernorm_qkv": (*NORM, *FUSED)}),
    "decoder": (
        {"layer_type": "decoder"},
        {
            "self_attention.layernorm_qkv": (*NORM, *SPLIT),
            "inter_attention.layernorm_query": (*NORM, "query_weight", "query_bias"),
            "inter_attention.key_value": SPLIT[2:],
            "inter_attention.proj": FUSED,
        },
    ),
    "output norm": (
        {"output_layernorm": True, "fuse_qkv_params": True, "qk_norm_type": "RMSNorm"},
        {
            "self_attention.qkv": FUSED,
            "layernorm": FUSED,
            "self_attention.q_norm": ("weight",),
            "self_attention.k_norm": ("weight",),
        },
    ),
}
"""Options, and the parameters by modules that Transformer Engine's layer has with them."""
EVERY_LAYER = {"self_attention.proj": FUSED, "layernorm_mlp": MLP}


def layer(kind: str, **options: Any) -> TransformerLayer:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": 2}
    return TransformerLayer(32, 48, 4, **{**plain, **LAYERS[kind][0], **options})


def with_state(kind: str) -> list[str]:
    """The modules that keep FP8 state; norms are none."""
    names = [*LAYERS[kind][1], *EVERY_LAYER]
    attentions = {name.partition(".")[0] for name in names if "attention" in name}
    return [name for name in names if not name.endswith("norm")] + [f"{name}.core_attention" for name in attentions]


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_are_called_as_transformer_engines(kind: str) -> None:
    names = {f"{module}.{leaf}" for module, leaves in {**EVERY_LAYER, **LAYERS[kind][1]}.items() for leaf in leaves}
    assert layer(kind).state_dict().keys() == names


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]:
    """Specification and state dict of every version and kind of layer."""
    torch.manual_seed(0)
    keys = [(version, kind) for version in VERSIONS for kind in LAYERS]
    specs = [spec(version, layer(kind).state_dict(), with_state(kind)) for version, kind in keys]
    written = te_files(specs, tmp_path_factory.mktemp("te"))
    for (version, kind), state_dict in zip(keys, written):
        if version.startswith("2."):  # norms are operations there, with a state that is empty
            norms = [name for name in LAYERS[kind][1] if name.endswith("norm")]
            state_dict |= {f"{name}._extra_state": torch.empty(0, dtype=torch.uint8) for name in norms}
    return dict(zip(keys, zip(specs, written)))


@pytest.mark.parametrize("way", ["load_state_dict", "load_te_state_dict"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_and_layout(version: str, kind: str, way: str, files: Any) -> None:
    written, state_dict = files[version, kind]
    model = layer(kind)
    if way == "load_state_dict":
        model.load_state_dict(state_dict)
    else:
        report = load_te_state_dict(model, state_dict)
        assert not report.with_outcome("ignored")
    assert_rows(model, expected_rows(written["states"], attention=version != "1.5"))
    assert all(torch.equal(value, written["parameters"][name]) for name, value in model.state_dict().items())


ROWS = {
    "split": {},
    "interleaved": {"fuse_qkv_params": True},
    "in three": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}


@pytest.mark.parametrize("way", ["load_state_dict", "load_te_state_dict"])
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("of_file", "of_model"),
    [("split", "interleaved"), ("split", "in three"), ("interleaved", "split"), ("in three", "split")],
)
@torch.no_grad()
def test_with_and_without_fuse_qkv_params(of_file: str, of_model: str, layer_type: str, way: str) -> None:
    """What the file's layer computes, the other computes with its parameters: each row is of its head."""
    saved = layer("split", layer_type=layer_type, **ROWS[of_file])
    draw(saved)
    said = {} if of_file != "in three" else {"qkv_weight_interleaved": False}
    model = nn.Sequential(layer("split", layer_type=layer_type, **{**ROWS[of_model], **said}))
    state_dict = {f"0.{name}": value for name, value in saved.state_dict().items()}
    if way == "load_state_dict":
        model.load_state_dict(state_dict)
    else:
        load_te_state_dict(model, state_dict)
    x = torch.randn(5, 2, 32)
    call = {"encoder_output": torch.randn(7, 2, 32)} if layer_type == "decoder" else {}
    torch.testing.assert_close(model[0](x, **call), saved(x, **call))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("version", ["1.7", "2.4"])
def test_what_is_exported_comes_back(kind: str, version: str) -> None:
    recipe = DelayedScaling(amax_history_len=4, fp8_dpa=True)
    model, again = layer(kind), layer(kind)
    call = {"encoder_output": torch.randn(7, 2, 32)} if kind == "decoder" else {}
    for _ in range(2):
        with fp8_autocast(fp8_recipe=recipe):
            y = model(torch.randn(5, 2, 32), **call)
        y.square().sum().backward()
        update_fp8_scales(model)
    exported = export_te_state_dict(model, version, recipe)
    load_te_state_dict(again, exported)
    before, after = fp8_state_dict(model), fp8_state_dict(again)
    assert after["names"] == before["names"]
    assert torch.equal(after["amax_history"][-3:], before["amax_history"][-3:])
    assert before["scale"].any()
    assert torch.equal(after["scale"], before["scale"])


class Blocks(L.LightningModule):
    """Four layers of a kind; keeps every training loss."""

    def __init__(self, kind: str = "split") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(kind) for _ in range(4))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.transpose(0, 1).bfloat16()
        for each in self.layers:
            x = each(x)
        loss = (x.float() - batch.transpose(0, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


DATA = torch.utils.data.DataLoader(torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(0)), 2)
RECIPE = DelayedScaling(amax_history_len=8, fp8_dpa=True)


@pytest.fixture(scope="module")
def lightning_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """By kind of layer what was saved, and a Lightning checkpoint as Transformer Engine's plugin would make."""
    folder, ours, specs = tmp_path_factory.mktemp("ckpt"), {}, []
    for kind, version in (("split", "1.7"), ("fused", "2.18")):
        trainer = fp8_trainer(RECIPE, max_epochs=1)
        trainer.fit(Blocks(kind), DATA)
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
        ours[kind] = torch.load(folder / f"{kind}.ckpt", weights_only=True)
        del ours[kind]["FP8Precision"]
        modules = [f"layers.{index}.{name}" for index in range(4) for name in with_state(kind)]
        specs.append(spec(version, ours[kind]["state_dict"], modules))
    for kind, state_dict in zip(ours, te_files(specs, folder)):
        torch.save({**ours[kind], "state_dict": OrderedDict(state_dict)}, folder / f"te_{kind}.ckpt")
    return {kind: (written, folder / f"te_{kind}.ckpt") for kind, written in zip(ours, specs)}


@thorough
@pytest.mark.parametrize("kind", ["split", "fused"])
def test_fit_resumes_layers(kind: str, lightning_files: Any, tmp_path: Path) -> None:
    written, path = lightning_files[kind]
    seen: dict[str, float] = {}

    class Record(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            history = trainer.precision_plugin.histories["model"]
            seen.update({} if seen else zip(history.names, history.scale.tolist()))

    def resumed(epochs: int, path: Path, *callbacks: L.Callback) -> tuple[L.Trainer, Blocks]:
        trainer, model = fp8_trainer(RECIPE, callbacks, max_epochs=epochs), Blocks(kind)
        trainer.fit(model, DATA, ckpt_path=path)
        return trainer, model

    trainer, model = resumed(2, path, Record())
    expected = {name: float(scale) for name, (scale, _) in expected_rows(written["states"]).items()}
    inside = [name for name in expected if name.split(".")[1] in "12"]
    assert {*seen} == {*inside}
    assert seen == {name: expected[name] for name in inside}
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    _, straight = resumed(3, path)
    _, later = resumed(3, tmp_path / "again.ckpt")
    assert model.losses + later.losses == straight.losses


def test_a_converted_model_shares_one_history(files: Any) -> None:
    written, state_dict = files["2.18", "split"]
    model = nn.ModuleList([layer("split"), layer("split")])
    convert_module(model, first_last_layers_bf16=False)
    both = {f"{index}.{name}": value for index in (0, 1) for name, value in state_dict.items()}
    load_te_state_dict(model, both)
    states = {f"{index}.{name}": value for index in (0, 1) for name, value in written["states"].items()}
    assert_rows(model, expected_rows(states))
    assert len({id(module.history) for module in model.modules() if hasattr(module, "history")}) == 1


@thorough
def test_the_reader_is_imported_where_a_state_is_met() -> None:
    """Lightning's own load of a file of 0.12 to 1.13 comes before, and takes its ``io.BytesIO`` all the same."""
    code = """
import io, sys
import torch
from lightning_fp8 import Linear, LayerNormMLP, TransformerLayer, FP8Precision
reader = {"lightning_fp8.te.te_state", "lightning_fp8.te.torch_file"}
state = io.BytesIO()
torch.save({"_extra_state": io.BytesIO(b"damaged")}, state)
state.seek(0)
loaded = torch.load(state, weights_only=True)
linear = Linear(16, 16)
linear.load_state_dict(linear.state_dict())
assert not reader & set(sys.modules), "imported without a state"
try:
    linear.load_state_dict({**linear.state_dict(), **loaded})
except RuntimeError as error:
    assert "_extra_state: the pickle is damaged" in str(error), error
else:
    raise AssertionError("damaged bytes were taken")
assert reader <= set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
