"""Exports of experts: ``torch.export`` has their ops, and ONNX, which has none, is refused or gets the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert_module, fp8_autocast, onnx_export
from lightning_fp8.export import translation_table
from lightning_fp8.modules.experts import Experts
from tests.tiers import thorough

pytest.importorskip("transformers.integrations.moe")


class Model(nn.Module):
    """Experts of Mixtral, whose routing is an argument."""

    def __init__(self, implementation: str = "grouped_mm", **options: Any) -> None:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4)
        config._experts_implementation = implementation
        self.experts = MixtralExperts(config)
        for each in self.experts.parameters():
            nn.init.normal_(each, std=0.1)
        convert_module(self, first_last_layers_bf16=False, **options)
        self.eval()

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = self.experts(x, top_k_index, top_k_weights)
        return y


def batch(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, 32), torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_an_exported_program_computes_as_the_module(recipe: str) -> None:
    model = Model()
    with fp8_autocast(fp8_recipe=recipe), onnx_export():
        program = torch.export.export(model, batch(6))
        others = batch(6)  # with other numbers of tokens for each expert
        assert torch.equal(program.module()(*others), model(*others))
    targets = [str(node.target) for node in program.graph.nodes if "lightning_fp8" in str(node.target)]
    assert targets.count("lightning_fp8.grouped_mm.default") == 2


@thorough
@pytest.mark.filterwarnings("ignore:fp8_autocast ran nothing in FP8")
def test_onnx_exports_skipped_experts_alone() -> None:
    def export(model: nn.Module) -> Any:
        with fp8_autocast(fp8_recipe="tensorwise"), onnx_export():
            return torch.onnx.export(
                model, batch(6), dynamo=True, opset_version=21, custom_translation_table=translation_table()
            )

    with pytest.raises(torch.onnx.OnnxExporterError, match=r"aten\.sort"):
        export(Model("batched_mm"))
    with pytest.warns(UserWarning, match="no layer of the model runs in FP8"):
        skipped = Model("batched_mm", skip=("*experts",))
    assert not isinstance(skipped.experts, Experts)
    assert type(export(skipped)).__name__ == "ONNXProgram"
