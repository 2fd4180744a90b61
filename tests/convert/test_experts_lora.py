"""peft's adapters on experts (``target_parameters``): experts run in FP8 under them, and adapters stay as they are."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.convert.first_step import conversion_summary
from lightning_fp8.numerics.recipes import RECIPES
from tests.convert.zoo import DECODER, hf, tokens

peft = pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.moe")

BATCH = tokens("input_ids", "labels")()
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
MODELS = {
    "Mixtral": hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **DECODER),
    "gpt-oss": hf("GptOssForCausalLM", "GptOssConfig", head_dim=8, num_local_experts=4, **DECODER),
}


def adapted(name: str = "Mixtral", parameters: tuple[str, ...] = (GATE_UP, DOWN)) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=[*parameters], lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(MODELS[name](), config)
    for key, each in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(each, std=0.1)
    return model


def backward(model: nn.Module, recipe: str | None = None) -> torch.Tensor:
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe or "delayed"):
        loss: torch.Tensor = model(**BATCH).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("parameters", [(GATE_UP, DOWN), (DOWN,)])
def test_adapters_of_experts_are_no_layers_in_fp8(parameters: tuple[str, ...]) -> None:
    model = adapted(parameters=parameters)
    convert_module(model, first_last_layers_bf16=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layer that is planned and not called is told
        backward(model, "rowwise")
        torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 1e-3).step()
    summary = conversion_summary(model)
    adapters = [row for row in summary.layers if "lora_" in row.name and "experts" in row.name]
    assert len(adapters) == 3 * 2 * len(parameters)
    assert {row.reason for row in adapters} == {"an adapter (LoRA) of another layer"}
    base = "base_layer." * len(parameters)
    ran = [row.name for row in summary.layers if row.ran and "layers.1.mlp" in row.name]
    assert ran == [f"base_model.model.model.layers.1.mlp.experts.{base}{name}_proj" for name in ("gate_up", "down")]
    assert not summary.idle


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_adapters_are_near_those_of_the_unconverted_model(name: str, recipe: str) -> None:
    """E4M3 rounds by up to 1/16: products of such operands differ by a few percent of their norm."""
    model = adapted(name)
    converted = convert_module(copy.deepcopy(model), first_last_layers_bf16=False)
    own = backward(model)
    if recipe == "delayed":  # the first step computes the scales of the second one
        backward(converted, recipe)
        torch.optim.SGD([each for each in converted.parameters() if each.requires_grad], 0.0).step()
        converted.zero_grad()
    found = backward(converted, recipe)
    assert found == pytest.approx(float(own), rel=0.01)
    for (key, mine), theirs in zip(converted.named_parameters(), model.parameters()):
        assert (mine.grad is None) == (theirs.grad is None) == ("lora_" not in key), key
        if mine.grad is not None and "experts" in key:
            error = float((mine.grad - theirs.grad).norm() / theirs.grad.norm())
            assert 0.001 < error < 0.2, (key, error)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_experts_multiply_by_the_merged_weights(recipe: str) -> None:
    """peft computes the parameter with its adapter in each forward, and FP8 casts that: as merged weights are cast."""
    model = adapted()
    merged = copy.deepcopy(model).merge_and_unload().requires_grad_()
    convert_module(model, first_last_layers_bf16=False, skip=["*.self_attn.*", "*.q_proj.*"])
    convert_module(merged, first_last_layers_bf16=False, skip=["*.self_attn.*"])
    assert backward(model, recipe) == pytest.approx(float(backward(merged, recipe)), rel=1e-4)
    frozen = model.get_base_model().model.layers[1].mlp.experts.get_base_layer()
    assert [key for key, _ in frozen.named_parameters()] == ["gate_up_proj", "down_proj"]  # no parametrization is left
    assert not any(each.requires_grad for each in frozen.parameters())


def test_adapters_train() -> None:
    """Losses of six steps follow those of the unconverted model; the experts' own weights keep their bits."""
    model = adapted()
    converted = convert_module(copy.deepcopy(model), first_last_layers_bf16=False)
    losses = []
    for each, recipe in ((model, None), (converted, "rowwise")):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], 5e-3)
        for _ in range(6):
            losses.append(float(backward(each, recipe)))
            optimizer.step()
            optimizer.zero_grad()
    own, found = losses[:6], losses[6:]
    assert found == pytest.approx(own, rel=0.03)
    assert found[-1] < 0.97 * found[0]
    for (key, mine), theirs in zip(converted.named_parameters(), adapted().parameters()):
        assert "lora_" in key or torch.equal(mine, theirs), key
