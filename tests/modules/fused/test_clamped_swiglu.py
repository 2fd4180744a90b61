"""LayerNormMLP with gpt-oss's activation, against its formula in float64, and in FP8 against its own parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fp8 import LayerNormMLP, Linear, TransformerLayer, fp8_autocast

PARAMS = [None, {"limit": 0.5, "alpha": 1.2, "glu_linear_offset": 0.25}]


def formula(h: Tensor, params: dict[str, float] | None) -> Tensor:
    """``openai/gpt-oss``: the model card's gated activation."""
    given = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0} | (params or {})
    half = h.shape[-1] // 2
    a = torch.minimum(h[..., :half], torch.tensor(given["limit"], dtype=h.dtype))
    up = torch.clip(h[..., half:], -given["limit"], given["limit"])
    return a / (1 + torch.exp(-given["alpha"] * a)) * (up + given["glu_linear_offset"])


@pytest.mark.parametrize("params", PARAMS)
def test_high_precision_is_the_formula(params: Any) -> None:
    mlp = LayerNormMLP(16, 24, activation="clamped_swiglu", activation_params=params, init_method=torch.nn.init.normal_)
    assert mlp.fc1_weight.shape == (48, 16)
    x, alike = torch.randn(8, 16), mlp.state_dict()
    w1, b1, w2, b2 = (alike[name].double() for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"))
    x64 = x.double().requires_grad_()
    expected = F.linear(formula(F.linear(F.layer_norm(x64, (16,)), w1, b1), params), w2, b2)
    x.requires_grad_()
    y = mlp(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_fp8_is_its_two_linear_layers_in_fp8(recipe: str, checkpoint: bool) -> None:
    mlp = LayerNormMLP(32, 64, activation="clamped_swiglu", checkpoint=checkpoint)
    fc1, fc2 = Linear(32, 128), Linear(64, 32)
    state = mlp.state_dict()
    for layer, name in ((fc1, "fc1"), (fc2, "fc2")):
        layer.load_state_dict({"weight": state[f"{name}_weight"], "bias": state[f"{name}_bias"]})
    x, alike = (torch.linspace(-3.0, 3.0, 2 * 16 * 32).cos().view(2, 16, 32).requires_grad_() for _ in range(2))
    with fp8_autocast(fp8_recipe=recipe):
        y = mlp(x)
        expected = fc2(formula(fc1(F.layer_norm(alike, (32,))), None))
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, alike.grad)
    torch.testing.assert_close(mlp.fc1_weight.grad, fc1.weight.grad)
    torch.testing.assert_close(mlp.fc2_weight.grad, fc2.weight.grad)


def test_arguments() -> None:
    layer = TransformerLayer(32, 48, 4, activation="clamped_swiglu", activation_params={"limit": 3.0})
    assert layer.layernorm_mlp.fc1_weight.shape == (96, 32)
    assert LayerNormMLP(16, 16, activation_params=None).activation == "gelu"
    for params, error, message in (
        ({"beta": 1.0}, ValueError, "activation_params='beta' is unknown; use one of 'limit'"),
        ({"limit": -1.0}, ValueError, "limit=-1.0 must be a finite number"),
        (7.0, TypeError, "activation_params=7.0 must be a mapping"),
    ):
        with pytest.raises(error, match=message):
            LayerNormMLP(16, 16, activation="clamped_swiglu", activation_params=params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation='silu' has no activation_params"):
        LayerNormMLP(16, 16, activation="silu", activation_params={"limit": 1.0})
