"""DotProductAttention under what goes wrong: padding of NaN, lengths that do not fit, devices, dtypes, micro-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DotProductAttention, Linear, fp8_autocast, make_recipe
from lightning_fp8.autocast import FP8Context, fp8_context
from lightning_fp8.delayed.history import AmaxHistory
from tests.attention_modules import Batch, cu_seqlens, drawn_batch, padding_of, run, taken_apart

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


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_calibration_brings_the_rows_where_the_tensors_are(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd")
    module.history.scale = torch.zeros(6, device="meta")  # stands for rows that lie elsewhere
    moved: list[torch.device] = []
    monkeypatch.setattr(AmaxHistory, "to", lambda self, device: moved.append(device))
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    context = FP8Context(make_recipe({"name": recipe, "fp8_dpa": True}), enabled=False, calibrating=True)
    with fp8_context(context):
        module(q, k, v)
    assert moved == [torch.device("cpu")]
    assert (module.history.recipe is context.recipe) == (recipe == "delayed")


def test_rows_move_with_a_module_that_has_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    module, moved = DotProductAttention(2, 8), []
    monkeypatch.setattr(AmaxHistory, "to", lambda self, device: moved.append(device))
    card = torch.device("cuda", 0)
    module._apply(lambda x: SimpleNamespace(device=card))
    module.half()
    module.to("meta")
    assert moved == [card, torch.device("cpu")]


@pytest.mark.parametrize("calibrating", [False, True])
def test_meta_tensors_are_not_observed(calibrating: bool) -> None:
    module, q = DotProductAttention(2, 8, qkv_format="bshd"), torch.empty(1, 5, 2, 8, device="meta")
    with fp8_autocast(not calibrating, calibrating=calibrating, fp8_recipe=FP8):
        o = module(q, q, q)
    assert o.is_meta
    assert o.shape == (1, 5, 16)
    assert module.history.scale.device == torch.device("cpu")
    assert not module.history.amax.any()


# ------------------------------------------------------------------------------------------------------ high precision


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_nan_in_padding_stays_there_in_high_precision(qkv_format: str, mask: str, softmax_type: str) -> None:
    lengths = [(7, 9), (3, 5)]
    queries, keys = zip(*lengths)
    x = drawn_batch(lengths, 2, 1, 8, torch.float32)
    module, bshd = (
        DotProductAttention(2, 8, num_gqa_groups=1, qkv_format=each, attn_mask_type=mask, softmax_type=softmax_type)
        for each in (qkv_format, "bshd")
    )
    given = {"cu_seqlens_q": cu_seqlens(queries), "cu_seqlens_kv": cu_seqlens(keys)}
    found = run(module, x, qkv_format, math.nan, **given)
    plain = "causal" if "causal" in mask else "no_mask"
    alone = [
        run(bshd, Batch(*([each] for each in sequence)), "bshd", attn_mask_type=plain)
        for sequence in zip(*x)
    ]
    for each, n, right in zip(found, (queries, queries, keys, keys), zip(*alone)):
        for rows, expected in zip(taken_apart(each, n, qkv_format), right):
            torch.testing.assert_close(rows, expected[0])
        for rows in padding_of(each, n, qkv_format):
            assert torch.equal(rows, torch.zeros_like(rows))
