"""``backward_override``: the forward in FP8, and gradients that are the products of torch in high precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    fp8_autocast,
    ops,
)
from lightning_fp8.numerics.scaled import Role

RECIPES = [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_a_linear_layer(recipe: Any, override: Any, kept: bool) -> None:
    scaling = recipe(backward_override=override)
    linear = Linear(64, 48)
    x, dy = torch.randn(3, 32, 64, requires_grad=True), torch.randn(3, 32, 48)
    with fp8_autocast(fp8_recipe=scaling):
        y = linear(x, is_first_microbatch=True if kept else None)
    with fp8_autocast(fp8_recipe=recipe()):
        assert torch.equal(y, linear(x))
    y.backward(dy)
    rows, of_rows, weight = x.detach().view(-1, 64), dy.view(-1, 48).double(), linear.weight.detach()
    if override == "dequantized":
        rows, weight = (
            ops.quantize(each, scaling.cast(role)).rowwise.dequantize(torch.float32)  # type: ignore[union-attr]
            for each, role in ((rows, Role.INPUT), (weight, Role.WEIGHT))
        )
    assert x.grad is not None
    torch.testing.assert_close(x.grad.view(-1, 64).double(), of_rows @ weight.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.weight.grad.double(), of_rows.t() @ rows.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.bias.grad.double(), of_rows.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("returns", [False, True])
def test_layernorm_linear_is_the_norm_and_the_linear_layer(recipe: Any, returns: bool) -> None:
    scaling = recipe(backward_override="high_precision")
    fused = LayerNormLinear(64, 48, return_layernorm_output=returns)
    norm, linear = nn.LayerNorm(64), Linear(64, 48)
    linear.load_state_dict({"weight": fused.weight, "bias": fused.bias})
    x, alike = (torch.linspace(-2.0, 2.0, 32 * 64).sin().view(32, 64).requires_grad_() for _ in range(2))
    with fp8_autocast(fp8_recipe=scaling):
        y = fused(x)
        expected = linear(norm(alike))
    y = y[0] if returns else y
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, alike.grad)
    torch.testing.assert_close(fused.weight.grad, linear.weight.grad)
    torch.testing.assert_close(fused.layer_norm_weight.grad, norm.weight.grad)


def test_gradients_go_to_main_grad_and_wait() -> None:
    linear = Linear(32, 32, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    linear.weight.main_grad = torch.zeros(32, 32)  # type: ignore[assignment]
    x = torch.randn(16, 32)
    with fp8_autocast(fp8_recipe=Float8CurrentScaling(backward_override="high_precision")):
        y = linear(x)
    y.sum().backward()
    assert not linear.weight.main_grad.any()
    linear.backward_dw()
    torch.testing.assert_close(linear.weight.main_grad, torch.ones(32, 16) @ x)  # type: ignore[arg-type]


def test_what_does_not_take_it() -> None:
    with pytest.raises(ValueError, match="is not supported by DelayedScaling"):
        DelayedScaling(backward_override="dequantized")
    with pytest.raises(ValueError, match="backward_override='bf16' is unknown"):
        Float8CurrentScaling(backward_override="bf16")  # type: ignore[arg-type]
    mlp, region = LayerNormMLP(32, 32), fp8_autocast(fp8_recipe=Float8CurrentScaling(backward_override="dequantized"))
    with region, pytest.raises(NotImplementedError, match="LayerNormMLP; use LayerNormLinear"):
        mlp(torch.randn(4, 32))
