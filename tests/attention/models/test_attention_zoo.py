"""Other people's models with attention in FP8 in a Trainer: counted, near BF16, and resumed however they recompute."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import FP8Callback, FP8Precision
from lightning_fp8.convert.summary import ATTENTION
from tests.convert.test_zoo import Fit, SaveEarly, animal, in_model
from tests.convert.zoo import DECODER, ZOO, Animal, hf
from tests.small import equal_weights, quiet_trainer
from tests.tiers import covering

TORCH_SDPA = F.scaled_dot_product_attention


class Case(NamedTuple):
    """A model, and by name its attention that runs in FP8, and that which stays in BF16 by its place."""

    animal: Animal
    fp8: str
    bf16: str


def padded(of: Animal) -> Animal:
    """Its second sequence ends in padding."""

    def batch() -> dict[str, Any]:
        ids = of.batch()["input_ids"]
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    return replace(of, batch=batch)


SELF = "model.layers.{}.self_attn"
MISTRAL = replace(ZOO["mistral"], make=hf("MistralForCausalLM", "MistralConfig", sliding_window=4, **DECODER))
CASES = {
    "llama": Case(ZOO["llama"], SELF.format(1), SELF.format("{0,2}")),
    "mistral": Case(padded(MISTRAL), SELF.format(1), SELF.format("{0,2}")),
    "qwen3": Case(ZOO["qwen3"], SELF.format(1), SELF.format("{0,2}")),
    "bert": Case(
        padded(ZOO["bert"]),
        "bert.encoder.layer.1.attention.self",
        "bert.encoder.layer.{0,2}.attention.self",
    ),
    "vit": Case(ZOO["vit"], "vit.layers.1.attention", "vit.layers.{0,2}.attention"),
    "whisper": Case(
        ZOO["whisper"],
        "model.{encoder.layers.1.self_attn,decoder.layers.1.{self_attn,encoder_attn}}",
        "model.{encoder.layers.{0,2}.self_attn,decoder.layers.{0,2}.{self_attn,encoder_attn}}",
    ),
    "torch_transformer": Case(
        ZOO["torch_transformer"],
        "",
        "transformer.{encoder.layers.{0,1,2}.self_attn,decoder.layers.{0,1,2}.{self_attn,multihead_attn}}",
    ),
}


class Gradient(L.Callback):
    """Of all parameters together, of the first step."""

    value: Tensor | None = None

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if self.value is None:
            self.value = torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])


def made(name: str) -> Fit:
    animal(name)  # or skip
    return Fit(CASES[name].animal)


def attn_implementation(module: Fit) -> str:
    return getattr(getattr(module.model, "config", None), "_attn_implementation", "")


def fit(module: Fit, *callbacks: L.Callback, path: Any = None) -> FP8Precision:
    plugin = FP8Precision("delayed", attention=True)
    trainer = quiet_trainer(max_epochs=3, plugins=[plugin], callbacks=[FP8Callback(), *callbacks])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*high precision.*")
        trainer.fit(module, ckpt_path=path)
    return plugin


@pytest.mark.usefixtures("no_other_models")
@pytest.mark.parametrize("name", covering(CASES, lambda name: {"mistral"} & {name}))
def test_models_train_and_resume(name: str, tmp_path: Any) -> None:
    fp8, bf16 = in_model(CASES[name].fp8), in_model(CASES[name].bf16)
    module, twin, ours, exact = made(name), made(name), Gradient(), Gradient()
    former = attn_implementation(module)
    summary = fit(module, SaveEarly(tmp_path / "x.ckpt"), ours).summary
    found = {layer.name: layer for layer in summary.layers if layer.kind == ATTENTION}
    assert {each: layer.precision for each, layer in found.items()} == {
        **dict.fromkeys(fp8, "FP8"),
        **dict.fromkeys(bf16, "BF16"),
    }
    assert {each for each, layer in found.items() if layer.ran} == fp8
    assert f"{len(fp8)} of {len(fp8 | bf16)} attentions" in summary.verdict()
    quiet_trainer(max_epochs=3, precision="bf16-true", callbacks=[exact]).fit(twin)
    assert module.losses == pytest.approx(twin.losses, rel=0.02)
    assert module.losses[-1] < module.losses[0]
    assert (ours.value - exact.value).norm() < 0.15 * exact.value.norm()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert attn_implementation(module) == former
    for reentrant in (True, False):
        resumed = made(name)
        if hasattr(resumed.model, "gradient_checkpointing_enable"):
            resumed.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        fit(resumed, path=tmp_path / "x.ckpt")
        assert resumed.losses == module.losses[-1:]
        if (
            name != "whisper" or not reentrant
        ):  # whose decoder adds up the encoder's gradient in another order, in BF16 too
            assert equal_weights(resumed, module)


def test_what_transformers_saves_does_not_name_us(tmp_path: Any) -> None:
    module = made("llama")

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert pl_module.model.config._attn_implementation == "lightning_fp8"  # type: ignore[union-attr]
            pl_module.model.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]

    plugin = FP8Precision("tensorwise", attention=True)
    quiet_trainer(plugins=[plugin], callbacks=[FP8Callback(), Save()]).fit(module)
    assert "lightning_fp8" not in (tmp_path / "config.json").read_text()
    transformers = importlib.import_module("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
