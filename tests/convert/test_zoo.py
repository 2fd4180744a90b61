"""Other people's models in a real Trainer: the table says what ran, losses are near BF16's, resume is to the bit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fp8 import FP8Callback, FP8Precision
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.names import gemm_name
from lightning_fp8.numerics.recipes import RECIPES
from tests.convert.zoo import ZOO, Animal, expand
from tests.small import equal_weights, quiet_trainer
from tests.tiers import thorough

STEPS = 3


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes of a layer that another test has compiled, the table cannot tell whether it ran."""
    monkeypatch.setattr("lightning_fp8.traced._traced", set())


class Fit(L.LightningModule):
    """Trains a model on one batch, an epoch for each step."""

    def __init__(self, animal: Animal) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = animal.make()
        self.batch = animal.batch()
        self.mixed = animal.mixed
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positional = [self.batch[""]] if "" in self.batch else []
        output = self.model(*positional, **{name: value for name, value in self.batch.items() if name})
        loss = output.loss if hasattr(output, "loss") else classified(output)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), 3e-3)

    def train_dataloader(self) -> Any:
        return DataLoader([0])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def on_fit_start(self) -> None:
        dtype = next(self.model.parameters()).dtype
        self.batch = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.batch.items()
        }


def classified(scores: Tensor) -> Tensor:
    """The loss of ``scores [..., classes]`` where the first is of class 0, the second of 1, and so on."""
    scores = scores.float().flatten(0, -2)
    return F.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[1])


class SaveEarly(L.Callback):
    """Saves before the last epoch, whose end resume must meet to the bit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == STEPS - 2:
            trainer.save_checkpoint(self.path)


def animal(name: str) -> Animal:
    found = ZOO[name]
    if wanted := os.environ.get("LIGHTNING_FP8_ZOO"):  # the packages whose models shall run or fail, and no others
        if found.needs not in wanted.split(","):
            pytest.skip(f"LIGHTNING_FP8_ZOO={wanted} asks for others")
    elif importlib.util.find_spec(found.needs) is None:
        pytest.skip(f"{found.needs} is not installed")
    if found.needs in ("transformers", "peft") and Version(importlib.metadata.version("transformers")).major < 5:
        pytest.skip("the layers' names are those of transformers 5")
    return found


def fit(module: Fit, recipe: str | None, path: Path | None = None, resume: Path | None = None) -> FP8Precision | None:
    dtypes = {"weights_dtype": "fp32", "compute_dtype": "bf16"} if module.mixed else {}
    plugin = FP8Precision(recipe, **dtypes) if recipe else None  # type: ignore[arg-type]
    callbacks = [FP8Callback()] if plugin else []
    trainer = quiet_trainer(
        max_epochs=STEPS,
        callbacks=[*callbacks, *([SaveEarly(path)] if path else [])],
        **({"plugins": [plugin]} if plugin else {"precision": "bf16-true"}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=resume)
    return plugin


@cache
def bf16_losses(name: str) -> list[float]:
    module = Fit(ZOO[name])
    fit(module, None)
    return module.losses


def in_model(text: str) -> set[str]:
    return {f"model.{name}" for name in expand(text)}


SEVERAL = "llama", "gpt2", "mixtral", "t5", "vit", "mamba", "timm_swin_v2", "torch_transformer", "peft_lora"
"""A decoder, Conv1D, experts, an encoder beside a decoder, images, no attention, windows, torch's layers, adapters."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [name if name in SEVERAL else pytest.param(name, marks=thorough) for name in ZOO])
def test_trains(name: str, recipe: str, tmp_path: Path) -> None:
    expected = animal(name)
    module = Fit(expected)
    plugin = fit(module, recipe, tmp_path / "x.ckpt")
    assert plugin is not None
    summary = plugin.summary
    assert summary is not None

    listed = {layer.name for layer in summary.layers if layer.fp8}
    assert listed == in_model(expected.fp8)
    assert {layer.name for layer in summary.layers if layer.kind not in ("linear", "experts")} == in_model(
        expected.other
    )
    assert {layer.name for layer in summary.idle} == in_model(expected.idle)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, LinearLayer)}
    ran = {gemm_name(n, gemm): m.record.fp8 for n, m in layers.items() for gemm in m.gemms if m.record.fp8}
    assert ran.keys() == listed - in_model(expected.idle)
    assert set(ran.values()) == {STEPS}
    assert not any(m.record.high_precision for m in layers.values())
    assert 0 < summary.share_of_flops < 1

    assert len(module.losses) == STEPS
    for loss, exact in zip(module.losses, bf16_losses(name)):
        assert math.isclose(loss, exact, rel_tol=expected.near)
    assert module.losses[-1] < module.losses[0]

    resumed = Fit(expected)
    again = fit(resumed, recipe, resume=tmp_path / "x.ckpt")
    assert resumed.losses == module.losses[-1:]
    assert equal_weights(resumed, module)
    for one, other in zip(plugin.histories.values(), again.histories.values(), strict=True):
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.amax_history, other.amax_history)


@pytest.mark.parametrize(("name", "recipe"), [("llama", "delayed"), ("gpt2", "tensorwise")])
@thorough
def test_compiled_trains_alike(name: str, recipe: str) -> None:
    """Compiled code hides what ran: the table says so, and names no layer."""
    eager, compiled = Fit(animal(name)), Fit(animal(name))
    fit(eager, recipe)
    compiled.model.compile(backend="aot_eager")
    plugin = fit(compiled, recipe)
    assert plugin is not None
    assert plugin.summary is not None
    assert compiled.losses == pytest.approx(eager.losses, rel=0.01)
    assert {layer.ran for layer in plugin.summary.layers} == {None}
    assert plugin.summary.share_of_flops is None
    assert not plugin.summary.idle


def test_shares_at_real_sizes() -> None:
    """Mixtral-8x7B: its experts are 97 % of its matrices."""
    animal("mixtral")
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig())
    width, hidden, vocabulary = 4096, 14336, 32000
    attention = 2 * width * width + 2 * 1024 * width  # queries and output, keys and values
    layer = attention + 8 * 3 * hidden * width + 8 * width  # ... experts, and what routes to them
    in_fp8 = 30 * (layer - 8 * width)
    summary = plan_conversion(model, Policy()).summary
    assert summary.share_of_parameters == pytest.approx(in_fp8 / (32 * layer + vocabulary * width))
    assert round(summary.share_of_parameters, 3) == 0.935
