"""The FLOPs of a step, against what torch counts of a model in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_fp8 import fp8_autocast
from lightning_fp8.attention.function import fp8_attention
from lightning_fp8.attention.ops.layouts import FORMATS
from lightning_fp8.convert.apply import apply_conversion
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.plan import plan_conversion
from lightning_fp8.convert.policy import Policy
from tests.convert.first_step.watched import Attends, Checkpointed, Mixed, normed


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_that_torch_counts(frozen: bool) -> None:
    model, x = Mixed(), torch.randn(2, 3, 8, 8)
    if frozen:
        model.requires_grad_(False)
        model.blocks[2].requires_grad_(True)
        model.reader.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        model(x).backward()
    summary = watched.finish()
    # One product of each block forward, and two backward; where only the third trains, its weight's and the input's of
    # the fourth. Activation checkpointing repeats that of an FP8 layer, which torch's stops before.
    product = 2 * 8 * 16 * 16
    assert summary.flops_in_fp8 == (6 if frozen else 12 + 1) * product
    assert summary.flops == counter.get_total_flops() + (0 if frozen else product)
    assert summary.share_of_flops == summary.flops_in_fp8 / summary.flops
    assert f"{100 * summary.share_of_flops:.3g} % of the step's FLOPs" in str(summary)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Sequential(nn.ConvTranspose2d(4, 8, 4, stride=4)), (5, 4, 2, 3), 3 * 2 * 5 * 2 * 3 * 4 * 8 * 16),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), (3, 7, 5), 3 * 2 * 7 * 5 * 8 * 27),
        (Attends(), (2, 3, 16), 3 * 2 * 2 * 256 * (3 + 5 + 5 + 3) + 7 * 2 * 2 * 3 * 5 * 16),
        (nn.Sequential(normed()), (4, 16), 3 * 2 * 4 * 256),
        (Checkpointed(nn.Linear(16, 16), nn.Linear(16, 16)), (4, 16), (2 * 3 + 1) * 2 * 4 * 256),
    ],
)
def test_flops_of_unusual_shapes(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    """A product forward and two backward, by hand, and one that is recomputed."""
    plan = plan_conversion(module, Policy(first_last_layers_bf16=False))
    apply_conversion(module, plan)
    watched = FirstStep(module, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        module(torch.randn(shape, requires_grad=True)).sum().backward()
    assert watched.finish().flops == expected


def test_flops_are_known_whatever_a_forward_takes() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mix = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 8))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.fc(batch["x"]) @ self.mix

    model = Hidden()
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        model({"x": torch.randn(4, 16)}).sum().backward()
    summary = watched.finish()
    assert summary.flops_in_fp8 == 2 * 2 * 4 * 256  # the input has no gradient
    assert summary.flops == summary.flops_in_fp8 + 3 * 2 * 4 * 16 * 8


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_flops_of_attention_in_fp8(qkv_format: str) -> None:
    """Two products forward and five backward, of two sequences."""
    batch, length, heads, channels = 2, 8, 4, 16
    shapes = {"sbhd": (length, batch), "bshd": (batch, length), "thd": (batch * length,)}
    q, k, v = (torch.randn(*shapes[qkv_format], heads, channels, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    of_thd = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if qkv_format == "thd" else {}
    with FlopCounterMode(display=False) as counter:
        fp8_attention(q, k, v, qkv_format=qkv_format, **of_thd).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * batch * length * length * heads * channels


def test_flops_of_attention_whose_queries_have_more_heads() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(32, 4 * 8), nn.Linear(32, 2 * 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
            kv = self.kv(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)

    model = Grouped()
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        model(torch.randn(2, 6, 32)).sum().backward()
    summary = watched.finish()
    assert summary.flops_in_fp8 == 2 * 2 * (2 * 6) * 32 * (32 + 16)  # no gradient of the input
    product = 2 * 2 * 4 * 6 * 6 * 8
    # torch 2.8 composes it of products on the CPU, and keeps the scores that others compute again.
    assert summary.flops is not None
    assert summary.flops - summary.flops_in_fp8 in (6 * product, 7 * product)


def test_a_formula_that_raises_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*shapes: object, **kwargs: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_registry, torch.ops.aten.bmm, raising)
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 4, 16)
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"), watched.counted():
        torch.bmm(model(x), x.mT).sum().backward()
    summary = watched.finish()
    assert model[0].weight.grad is not None
    assert summary.flops is None
    assert "FLOPs" not in str(summary)
