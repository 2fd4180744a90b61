"""DotProductAttention under what goes wrong: padding of NaN, lengths that do not fit, devices, dtypes, micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DotProductAttention, Linear, fp8_autocast

FP8 = {"name": "delayed", "fp8_dpa": True, "amax_history_len": 4}


class Block(nn.Module):
    """Built, not converted: each layer has a history of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attention = Linear(16, 48), DotProductAttention(2, 8, qkv_format="bshd")

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3))


# ---------------------------------------------------------------------------------------------- delayed scaling's rows


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_attentions_rows_are_updated_as_often_as_linears(micro_batches: int) -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(micro_batches):
            with fp8_autocast(fp8_recipe=FP8):
                y = model(torch.randn(2, 5, 16))
            y.sum().backward()
        optimizer.step()
    assert model.qkv.history is not model.attention.history
    assert model.attention.history.updates == model.qkv.history.updates
    assert model.attention.history.stepped
