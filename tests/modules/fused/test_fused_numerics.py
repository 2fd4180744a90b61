"""LayerNormLinear and LayerNormMLP, outputs and all gradients, against float64 with casts of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import LayerNorm, LayerNormLinear, LayerNormMLP, RMSNorm, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from tests.modules.fused.cases import (
    ACTIVATIONS,
    PLAIN_OF_GATED,
    distance,
    distances,
    pairwise,
    randomized,
    reference,
    rounding_of,
    sample,
    unrounded,
)

FLAGS = {
    "dtype": [torch.float32, torch.bfloat16],
    "shape": [(64, 128, 96), (37, 100, 50), (2, 3, 7, 33, 12)],
    "normalization": ["LayerNorm", "RMSNorm"],
    "zero_centered_gamma": [False, True],
    "bias": [True, False],
    "return_bias": [False, True],
    "return_layernorm_output": [False, True],
}
LINEAR_CASES = pairwise({"recipe": list(RECIPES), "parameters_split": [None, ("query_", "kv")], **FLAGS})
MLP_CASES = pairwise(
    {
        "recipe": list(RECIPES),
        "activation": list(dict.fromkeys([*ACTIVATIONS, *PLAIN_OF_GATED])),
        "checkpoint": [False, True],
        **FLAGS,
    }
)
# An element that lies at the border of two codes may be cast to either; bfloat16 between the layers moves more of them.
BOUND = {torch.float32: 2e-3, torch.bfloat16: 0.06}


def named(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values() if not isinstance(value, (bool, torch.dtype, type(None))))


def check(cls: type, case: dict[str, Any]) -> None:
    arguments = dict(case)
    recipe, dtype = arguments.pop("recipe"), arguments.pop("dtype")
    *leading, features, others = arguments.pop("shape")
    activation = case.get("activation", "")
    module = randomized(cls(features, others, params_dtype=dtype, **arguments))
    x = sample(*leading, features, dtype=dtype)
    found = distances(module, x, activation, rounding_of(recipe), fp8_recipe=recipe)
    assert max(found.values()) < BOUND[dtype], found
    if recipe == "tensorwise":
        found = distances(module, x, activation, enabled=False)
        assert max(found.values()) < {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype], found


@pytest.mark.parametrize("case", LINEAR_CASES, ids=named)
def test_layernorm_linear(case: dict[str, Any]) -> None:
    check(LayerNormLinear, case)


@pytest.mark.parametrize("case", MLP_CASES, ids=named)
def test_layernorm_mlp(case: dict[str, Any]) -> None:
    check(LayerNormMLP, case)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_they_are_compared_with_is_rounded_as_fp8_is(recipe: str) -> None:
    """Half an ulp of E4M3 is at most 1/16 of a number, on the average of squares about 1/38; there are two factors."""
    module, x = randomized(LayerNormLinear(128, 96)), sample(64, 128)
    right, _ = reference(module, x, "", unrounded)
    rounded, _ = reference(module, x, "", rounding_of(recipe))
    assert 0.02 < distance(rounded["y"], right["y"]) < 0.06


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("leading", [(0,), (2, 0), (1,)])
def test_no_rows_and_one(recipe: str, leading: tuple[int, ...]) -> None:
    for cls in (LayerNormLinear, LayerNormMLP):
        module = randomized(cls(24, 40, return_layernorm_output=True))
        if 0 not in leading:
            found = distances(module, sample(*leading, 24), "gelu", rounding_of(recipe), fp8_recipe=recipe)
            assert max(found.values()) < BOUND[torch.float32], found
            continue
        x = torch.randn(*leading, 24, requires_grad=True)
        with fp8_autocast(fp8_recipe=recipe):
            y, normalized = module(x)
        (y.sum() + normalized.sum()).backward()
        assert y.shape == (*leading, 40 if cls is LayerNormLinear else 24)
        assert normalized.shape == x.shape == x.grad.shape  # type: ignore[union-attr]
        assert all(not parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_do_not_depend_on_strides(norm: type[nn.Module], dtype: torch.dtype) -> None:
    x = torch.randn(96, 200).to(dtype)
    layer = norm(96)
    results = []
    for each in (x.t(), x.t().contiguous()):
        each = each.detach().requires_grad_()
        y = layer(each)
        y.square().sum().backward()
        results += [y, each.grad]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
