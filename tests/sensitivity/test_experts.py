"""Sensitivity of a mixture of experts: a row for both weights of a layer's experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.modules.experts import Experts
from lightning_fp8.sensitivity import measure_sensitivity
from tests.convert.zoo import DECODER, HIDDEN, WIDTH, hf, tokens

pytest.importorskip("transformers.integrations.moe")

BATCH = tokens("input_ids", "labels")()
EXPERTS, TOP_K = 4, 2


def gradient(model: nn.Module, in_fp8: bool) -> torch.Tensor:
    with fp8_autocast(enabled=in_fp8, fp8_recipe="rowwise"):
        model(**BATCH).loss.backward()
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


def test_a_row_for_the_experts_of_a_layer() -> None:
    """Its error is that of a model with only them in FP8, and its share counts the experts that a token is sent to."""
    torch.manual_seed(0)
    model = hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, **DECODER)()
    found = measure_sensitivity(model, [BATCH], recipe="rowwise", progress=False)
    rows = {row.name: row for row in found.rows}
    assert [name for name in rows if "experts" in name and "layers.1" in name] == ["model.layers.1.mlp.experts"]
    row = rows["model.layers.1.mlp.experts"]

    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2
    experts = TOP_K * 3 * WIDTH * HIDDEN
    assert row.flops == pytest.approx(experts / (3 * (attention + experts)))

    alone = convert_module(
        copy.deepcopy(model), first_last_layers_bf16=False, fuse=False,
        skip=lambda module, name: name != "model.layers.1.mlp.experts",
    )  # fmt: skip
    assert sum(isinstance(module, Experts) for module in alone.modules()) == 1
    reference = gradient(copy.deepcopy(model).train(), False)
    error = float((gradient(alone.train(), True) - reference).norm() / reference.norm())
    assert row.error == pytest.approx(error, rel=1e-3)
    assert row.error > 0.001

    skip = found.skip(row.error / 2)
    assert "model.layers.1.mlp.experts" in skip
    convert_module(model, first_last_layers_bf16=False, skip=list(skip))
    assert not isinstance(model.get_submodule("model.layers.1.mlp.experts"), Experts)
