"""What the table says of attention that its module alone shows not to train in FP8, and of what ran after all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_fp8 import FP8FabricPrecision, TransformerLayer
from lightning_fp8.convert.summary import ATTENTION, ConversionSummary
from tests.convert.zoo import DECODER, hf

SECOND = "blocks.1.self_attention.core_attention"


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerLayer(32, 48, 4, **options) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def planned(model: nn.Module) -> ConversionSummary:
    plugin = FP8FabricPrecision({"name": "delayed"}, attention=True)
    plugin.convert_module(model)
    assert plugin.summary is not None
    return plugin.summary


def attentions(summary: ConversionSummary | None) -> dict[str, tuple[str, str]]:
    assert summary is not None
    return {layer.name: (layer.precision, layer.reason) for layer in summary.layers if layer.kind == ATTENTION}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "attention_dropout=0.1 in training"),
        ({"attention_dropout": 0.0, "softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"attention_dropout": 0.0, "self_attn_mask_type": "arbitrary"}, "attn_mask_type='arbitrary'"),
    ],
)
def test_a_module_that_cannot_train_in_fp8_is_listed_with_its_reason(options: Any, reason: str) -> None:
    summary = planned(Layers(**options))
    found = attentions(summary)
    assert found[SECOND] == found[SECOND.replace("1", "2")] == ("BF16", reason)
    assert "0 of 4 attentions" in summary.verdict()
    assert "one of the first 1" in found[SECOND.replace("1", "0")][1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (1, 32)).transpose(1, 2)
        return self.o(nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


class Generated(nn.Module):
    """Blocks, and a module whose forward torch generated."""

    def __init__(self, generated: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.generated = generated

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.generated(x)


@pytest.mark.parametrize(
    "generate",
    [torch.fx.symbolic_trace, lambda module: torch.export.export(module, (torch.randn(2, 8, 32),)).module()],
    ids=["traced", "exported"],
)
@pytest.mark.parametrize("inner", [nn.ReLU, Attention])
def test_a_generated_forward_has_no_module_and_is_read(generate: Any, inner: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generated = generate(nn.Sequential(inner()))
    assert type(generated).forward.__module__ is None
    model = Generated(generated)
    found = planned(model)
    assert {name for name in attentions(found) if name.startswith("blocks")} == {f"blocks.{i}" for i in range(4)}
    assert ("generated" in attentions(found)) == (inner is Attention)
    assert {layer.name: layer.fp8 for layer in found.layers}["blocks.1.q"]
    assert model(torch.randn(2, 8, 32)).shape == (2, 8, 32)


def test_a_generated_function_that_a_forward_calls_is_read() -> None:
    names: dict[str, Any] = {"F": nn.functional}
    exec("def attend(q): return F.scaled_dot_product_attention(q, q, q)", names)
    names["attend"].__module__ = None

    class Calling(nn.Module):
        attend = staticmethod(names["attend"])

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x)

    assert attentions(planned(nn.Sequential(Calling())))["0"] == ("FP8", "")


def test_without_dropout_it_is_fp8() -> None:
    summary = planned(Layers(attention_dropout=0.0))
    assert attentions(summary)[SECOND] == ("FP8", "")
    assert "2 of 4 attentions" in summary.verdict()


def test_dropout_of_models_that_know_nothing_of_fp8() -> None:
    reason = "its dropout is 0.1 in training; set it to 0"
    llama = hf("LlamaForCausalLM", "LlamaConfig", **DECODER, attention_dropout=0.1)()
    assert attentions(planned(llama))["model.layers.1.self_attn"] == ("BF16", reason)


def stepped(fabric: Fabric, model: Any, optimizer: Any) -> None:
    model(torch.randn(6, 2, 32)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_under_fabric_the_table_says_what_ran(dropout: float) -> None:
    """Each module is asked after the first step: its dropout may be another then than when it was converted."""
    plugin = FP8FabricPrecision({"name": "tensorwise"}, attention=True)
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    layers = Layers(attention_dropout=0.1 - dropout, hidden_dropout=0.0)
    model, optimizer = fabric.setup(layers, torch.optim.SGD(layers.parameters(), 0.1))
    layers.blocks[1].self_attention.core_attention.attention_dropout = dropout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        stepped(fabric, model, optimizer)
    right = ("BF16", "attention_dropout=0.1 in training") if dropout else ("FP8", "")
    assert attentions(plugin.summary)[SECOND] == right


def test_what_cannot_train_in_fp8_is_evaluated_in_it() -> None:
    plugin = FP8FabricPrecision({"name": "tensorwise"}, attention=True)
    layers = Layers().eval()
    plugin.convert_module(layers)
    with torch.no_grad(), plugin.forward_context():
        layers(torch.randn(6, 2, 32))
    attention = layers.get_submodule(SECOND)
    assert attention.reason == ""
    assert attention.record.evaluations == 1


def test_a_reason_is_told_once() -> None:
    plugin = FP8FabricPrecision({"name": "tensorwise"}, attention=True, first_last_layers_bf16=False)
    layers = Layers()
    plugin.convert_module(layers)
    with warnings.catch_warnings(record=True) as caught, plugin.forward_context():
        warnings.simplefilter("always")
        for _ in range(2):
            layers(torch.randn(6, 2, 32))
    told = [str(each.message) for each in caught if "attention_dropout=0.1" in str(each.message)]
    assert told == ["DotProductAttention runs in high precision: attention_dropout=0.1 in training"]
