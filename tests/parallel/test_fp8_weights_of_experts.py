"""Experts whose weights ``fp8_model_init`` keeps in FP8, beside experts that have these values in high precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import convert_module, fp8_autocast, fp8_model_init, with_master_weights
from lightning_fp8.weights.fp8_tensor import FP8Tensor

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

EXPERTS, WIDTH, HIDDEN, TOKENS = 3, 48, 96, 20
RECIPES = ["delayed", "tensorwise", "blockwise", "rowwise", "mxfp8"]


def experts(kind: str) -> nn.ModuleDict:
    """``gpt-oss`` has biases, and each matrix transposed."""
    config: Any
    if kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as cls

        config = transformers.MixtralConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as cls

        config = transformers.GptOssConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    layer = cls(config)
    generator = torch.Generator().manual_seed(0)
    for each in layer.parameters():
        each.data = torch.randn(each.shape, generator=generator).mul(0.1).bfloat16()
    return nn.ModuleDict({"experts": layer})


def converted(model: nn.Module) -> nn.Module:
    return convert_module(model, first_last_layers_bf16=False)


def passes(model: Any, recipe: str | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().requires_grad_()
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = model["experts"](x, index, torch.rand(TOKENS, 2, generator=generator).bfloat16())
    y.float().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_train_as_those_that_have_the_values(recipe: str, kind: str) -> None:
    with fp8_model_init(recipe=recipe):
        model = converted(experts(kind))
    weights = {name: each for name, each in model.named_parameters() if not name.endswith("bias")}
    kept = [*weights.values()]
    assert [type(each) for each in kept] == [FP8Tensor] * 2
    assert sum(each._row_data.nbytes + each._row_scale_inv.nbytes for each in kept) < 1.01 * sum(
        map(Tensor.numel, kept)
    )
    plain = experts(kind)
    for name, given in plain.named_parameters():
        assert name.endswith("bias") or 0 < relative(weights[name].dequantize(), given) < 0.04
    plain.load_state_dict(model.state_dict())
    converted(plain)
    optimizers = [with_master_weights(torch.optim.SGD(each.parameters(), 0.5)) for each in (model, plain)]
    for _ in range(2):
        results, expected = passes(model, recipe), passes(plain, recipe)
        results += [each.grad for each in model.parameters()]
        expected += [each.grad for each in plain.parameters()]
        errors = [relative(*pair) for pair in zip(results, expected, strict=True)]
        # Scales that are no powers of two round the values of the reference again.
        assert max(errors) < (0.1 if recipe in ("delayed", "tensorwise") else 1e-30)
        before = copy.deepcopy(model.state_dict())
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert not any(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        plain.load_state_dict(model.state_dict())  # rounded
    state = model.state_dict()
    model.load_state_dict(state)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def test_without_fp8_the_values_are_multiplied() -> None:
    with fp8_model_init():
        model = converted(experts("mixtral"))
    plain = experts("mixtral")
    plain.load_state_dict(model.state_dict())
    for found, expected in zip(passes(model, None), passes(plain, None)):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-5)
