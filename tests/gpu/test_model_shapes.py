"""Checks of the first two steps, on a GPU: all casts and products of a model pass, and the ops are restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.proofs.model_shapes import STEPS, CheckedCalls


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("width", [512, 200])
def test_a_model_passes(recipe: str, width: int) -> None:
    before = dict(quantize_op.implementations), dict(quantize_op.plans)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).cuda()
    convert_module(model, first_last_layers_bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = CheckedCalls()
    for _ in range(STEPS):
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(torch.randn(384, width, device="cuda")).square().mean()
        loss.backward()
        assert calls._seen
        optimizer.step()
        calls._seen.clear()
    calls.end()
    assert (quantize_op.implementations, quantize_op.plans) == before
