"""DotProductAttention in a model: recomputed, observed, calibrated, converted, copied."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import DotProductAttention, convert_module, fp8_autocast, fp8_state_dict
from lightning_fp8.attention.modules import core
from lightning_fp8.numerics.scaled import Role
from tests.attention.attention_modules import EVEN, drawn_batch, laid_out, run


def fp8(recipe: str) -> fp8_autocast:
    return fp8_autocast(fp8_recipe={"name": recipe, "fp8_dpa": True})


# ----------------------------------------------------------------------------------------- activation checkpointing


class Model(nn.Module):
    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.attention = DotProductAttention(2, 32, qkv_format="bshd")
        self.recompute = recompute

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).unbind(-3)
        return self.attention(q, k, v, checkpoint_core_attention=self.recompute == "core")

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute in ("reentrant", "non-reentrant"):
            y = checkpoint(self.attend, x, use_reentrant=self.recompute == "reentrant")
        else:
            y = self.attend(x)
        return self.proj(y)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant", "core"])
def test_recomputation_changes_no_bit(recompute: str, recipe: str) -> None:
    plain = Model()
    other = copy.deepcopy(plain)
    other.recompute = recompute
    x, numbers = torch.randn(2, 150, 64), []
    for model in (plain, other):
        leaf = x.clone().requires_grad_()
        with fp8(recipe):
            y = model(leaf)
        y.square().mean().backward()
        assert model.attention.record.fp8 == 1
        numbers.append([y, leaf.grad, *(p.grad for p in model.parameters()), model.attention.history.amax.clone()])
    assert all(torch.equal(*pair) for pair in zip(*numbers))
    assert bool(numbers[0][-1].any()) == (recipe == "delayed")


# --------------------------------------------------------------------------------------------- delayed scaling's slots


def test_rows_are_observed_where_tensors_pass() -> None:
    module, x = DotProductAttention(2, 64, qkv_format="bshd"), drawn_batch(EVEN, 2, 2, 64)
    x.k[0][3, 0, 5] = 9.0
    with fp8("delayed"):
        with torch.no_grad():
            module(*(laid_out(each, "bshd") for each in x[:3]))
        assert not module.history.amax.any(), "evaluation moves nothing"
        o, *gradients = run(module, x, "bshd")
    amax = {role.value: slot.amax.item() for role, slot in module.slots.items()}
    assert amax == {
        "qkv": 9.0,
        "s": 0.0,
        "o": o.abs().max().item(),
        "dqkv": max(each.abs().max().item() for each in gradients),
        "do": max(each.abs().max().item() for each in x.do),
        "dp": 0.0,
    }
    with fp8("tensorwise"):
        run(module, x, "bshd")
    assert amax == {role.value: slot.amax.item() for role, slot in module.slots.items()}


def test_calibration_observes_the_same_tensors() -> None:
    module, x = DotProductAttention(2, 64, qkv_format="bshd"), drawn_batch(EVEN, 2, 2, 64)
    with fp8_autocast(enabled=False, calibrating=True, fp8_recipe={"name": "delayed", "fp8_dpa": True}):
        o, *gradients = run(module, x, "bshd")
        amax = [slot.amax.item() for slot in module.slots.values()]
    plain = run(module, x, "bshd")
    assert all(torch.equal(*pair) for pair in zip((o, *gradients), plain))
    largest = [max(each.abs().max().item() for each in of) for of in ((*x.q, *x.k, *x.v), [o], gradients, x.do)]
    assert [amax[index] for index in (0, 2, 3, 4)] == largest
    assert module.slots[Role.QKV].scale == 448 / torch.tensor(largest[0])


def test_a_model_is_converted_around_it() -> None:
    model = convert_module(nn.Sequential(Model(), Model(), Model()), first_last_layers_bf16=False)
    names = fp8_state_dict(model)["names"]
    assert [name for name in names if name.startswith("1.attention.")] == [
        f"1.attention.{role}" for role in ("qkv", "s", "o", "dqkv", "do", "dp")
    ]
    assert model[1].attention.history is model[0].qkv.history
    with fp8("delayed"):
        y = model(torch.randn(2, 20, 64))
    y.sum().backward()
    assert model[2].attention.slots[Role.DO].amax > 0


# -------------------------------------------------------------------------------------------- what does not run in FP8


def test_a_copy_and_a_state_dict() -> None:
    module = DotProductAttention(2, 64)
    assert not module.state_dict()
    twin = copy.deepcopy(module)
    x = drawn_batch(EVEN, 2, 2, 64)
    with fp8("delayed"):
        assert torch.equal(run(module, x, "sbhd")[0], run(twin, x, "sbhd")[0])
    assert twin.history is not module.history


def test_outside_fp8_autocast_it_is_torchs_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 30, 32)
    module = DotProductAttention(4, 32, qkv_format="bshd")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    found = module(*(each.transpose(1, 2) for each in (q, k, v)))
    assert torch.equal(found, expected)
    module.fp8 = False
    with fp8("tensorwise"):
        assert torch.equal(module(*(each.transpose(1, 2) for each in (q, k, v))), expected)


def test_attention_without_its_kernels_is_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the call; nobody asks, and no kernel is made, where attention shall not run in FP8."""
    reason, asked = "the backward pass of FP8 attention does not run on A Card: no registers are left", []
    monkeypatch.setattr(core, "why_not_fp8", lambda *qkv, **options: asked.append(options) or reason)
    q, k, v = (x.transpose(1, 2) for x in torch.randn(3, 2, 4, 30, 32))
    module = DotProductAttention(4, 32, qkv_format="bshd", center_keys=False)
    expected = module(q, k, v)
    with fp8_autocast(fp8_recipe="tensorwise"):
        assert torch.equal(module(q, k, v), expected)
    assert not asked
    with (
        pytest.warns(UserWarning, match=f"DotProductAttention runs in high precision: {reason}") as caught,
        fp8("tensorwise"),
    ):
        outputs = [module(q, k, v) for _ in range(2)]
    assert len(caught) == 1
    assert all(torch.equal(each, expected) for each in outputs)
    assert module.reason == reason
    assert (module.record.fp8, module.record.high_precision) == (0, 4)
    with torch.autocast("cpu", torch.bfloat16), fp8("tensorwise"):
        module(q, k, v)
    assert [each["dtype"] for each in asked] == [None, None, torch.bfloat16]
    assert all((each["center_keys"], each["of_codes"]) == (False, False) for each in asked)
