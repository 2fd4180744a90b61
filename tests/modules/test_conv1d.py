"""GPT-2's Conv1D in FP8: a linear layer whose weight lies transposed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_fp8 import (
    Linear,
    convert_module,
    export_te_state_dict,
    fp8_autocast,
    fp8_state_dict,
    make_recipe,
    update_fp8_scales,
)
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.functions.product import Product
from lightning_fp8.modules.conv1d import TransposedLinear
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Role
from tests.tiers import thorough

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


def conv1ds(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Conv1D(out, into) for into, out in zip(sizes, sizes[1:])))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.3)
        nn.init.normal_(layer.bias)
    return model


def as_linears(model: nn.Sequential) -> nn.Sequential:
    """The same function as layers of ours, with weights the other way round."""
    linears = nn.Sequential(*(Linear(layer.weight.shape[0], layer.weight.shape[1]) for layer in model))
    for linear, layer in zip(linears, model):
        linear.weight.data.copy_(layer.weight.data.t())
        linear.bias.data.copy_(layer.bias.data)
    return linears


def converted(model: nn.Module) -> nn.Module:
    return convert_module(model, first_last_layers_bf16=False)


def test_conversion_keeps_parameters_keys_and_class() -> None:
    model = conv1ds(16, 48, 16)
    before, parameters = {key: value.clone() for key, value in model.state_dict().items()}, list(model.parameters())
    converted(model)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    for layer in model:
        assert isinstance(layer, Conv1D)  # whoever asks for transformers' own still finds it
        assert not isinstance(layer, nn.Linear)  # whose weight lies the other way
    assert [(layer.out_features, layer.in_features) for layer in model] == [(48, 16), (16, 48)]
    assert fp8_state_dict(model)["names"] == [f"{i}.{role.value}" for i in (0, 1) for role in LINEAR_ROLES]
    conv1ds(16, 48, 16).load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_a_region_it_computes_as_before(dtype: torch.dtype) -> None:
    model = conv1ds(16, 48, 16).to(dtype)
    x = torch.randn(2, 5, 16, dtype=dtype)
    before = model(x)
    assert torch.equal(converted(model)(x), before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_linear_with_the_weight_the_other_way_round(recipe: str) -> None:
    """Output and gradients, to the bit, for two steps: the second has delayed scales."""
    model = conv1ds(48, 160, 33)
    linears = as_linears(model)
    converted(model)
    for step in range(2):
        x = torch.randn(2, 9, 48) * (step + 1)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        with fp8_autocast(fp8_recipe=recipe):
            outputs = [module(into) for module, into in zip((model, linears), inputs)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
        assert torch.equal(*(into.grad for into in inputs))
        for layer, linear in zip(model, linears):
            assert torch.equal(layer.weight.grad.t(), linear.weight.grad)
            assert torch.equal(layer.bias.grad, linear.bias.grad)
        for module in (model, linears):
            update_fp8_scales(module)
    if recipe == "delayed":
        scales = [fp8_state_dict(module)["scale"] for module in (model, linears)]
        assert (scales[0] > 0).all()
        assert torch.equal(*scales)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_near_float64(recipe: str) -> None:
    model = conv1ds(64, 96)
    x, weight = torch.randn(32, 64), model[0].weight.detach().double()
    exact = x.double() @ weight + model[0].bias.detach().double()
    converted(model)
    with fp8_autocast(fp8_recipe=recipe):
        y = model(x)
    assert 0 < (y.double() - exact).norm() / exact.norm() < 0.05
    y.sum().backward()
    exact_grad = x.double().t() @ torch.ones(32, 96, dtype=torch.float64)
    assert (model[0].weight.grad - exact_grad).norm() / exact_grad.norm() < 0.06


@pytest.mark.parametrize("shape", [(33, 70), (128, 256), (1, 5), (5, 1), (0, 16)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_transposed_view_is_cast_as_its_copy(recipe: str, shape: tuple[int, int]) -> None:
    chosen = make_recipe(recipe)
    results = []
    for view in (True, False):
        history = AmaxHistory([("weight", Role.WEIGHT)])
        generator = torch.Generator().manual_seed(3)
        x: Any = torch.randn(shape, generator=generator).t()
        x = x if view else x.contiguous()
        slots = {Role.WEIGHT: history.slot(0)}
        cast = Product(chosen, slots, True).quantize(x, Role.WEIGHT, columnwise=True)
        results.append((*cast, history.amax))
    for one, other in zip(results[0][:2], results[1][:2]):
        assert one.layout == other.layout
        assert torch.equal(one.data.float(), other.data.float())
        assert torch.equal(one.scale_inv.float(), other.scale_inv.float())
    assert torch.equal(results[0][2], results[1][2])


def test_copies_and_pickles() -> None:
    model = converted(conv1ds(16, 16, 16))
    x = torch.randn(4, 16)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(model[0])
        with fp8_autocast(fp8_recipe="tensorwise"):
            assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("leaves", [False, True])
def test_fully_sharded_it_trains_alike(leaves: bool, one_rank: DeviceMesh) -> None:
    """FSDP2 frees the gathered weight, whose view backward reads, after each forward."""
    model, x = conv1ds(32, 48, 32), torch.randn(6, 32)
    twin = copy.deepcopy(model)
    for layer in twin if leaves else ():
        fully_shard(layer, mesh=one_rank)
    fully_shard(twin, mesh=one_rank)
    for module in (model, twin):
        converted(module)
        with fp8_autocast(fp8_recipe="blockwise"):
            module(x).square().mean().backward()
    for layer, sharded in zip(model, twin):
        assert isinstance(sharded, TransposedLinear)
        assert torch.equal(layer.weight.grad, sharded.weight.grad.full_tensor())


def test_errors_say_what_would_fit() -> None:
    model = converted(conv1ds(16, 48))
    with fp8_autocast(), pytest.raises(ValueError, match="has in_features=16, but the input has shape"):
        model(torch.randn(2, 48))


def test_transformer_engine_has_no_such_module() -> None:
    with pytest.raises(ValueError, match=r"^0, 1: Transformer Engine has no module .* transformers' Conv1D \("):
        export_te_state_dict(converted(conv1ds(16, 16, 16)), "1.13")


@thorough
def test_compiles_without_a_break() -> None:
    model = converted(conv1ds(32, 48, 16))
    x = torch.randn(4, 32)
    with fp8_autocast(fp8_recipe="tensorwise"):
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, expected)


def test_another_class_of_that_name_is_none() -> None:
    stranger = type("Conv1D", (Conv1D,), {"forward": lambda self, x: x, "__module__": "elsewhere"})
    model = converted(nn.Sequential(stranger(16, 16)))
    assert type(model[0]) is stranger
