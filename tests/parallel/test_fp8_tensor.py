"""FP8Tensor: operands inside, values outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_fp8 import Linear, fp8_autocast
from lightning_fp8.numerics.formats import E4M3
from lightning_fp8.numerics.recipes import make_recipe
from lightning_fp8.numerics.scaled import Cast, Layout, Role
from lightning_fp8.weights.fp8_tensor import FP8Tensor, quantized_tensor

POWER_2 = Cast(E4M3, Layout.TENSOR, power_2_scale=True)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """``values`` rounded to E4M3 after a scale, a power of two; computed in float64."""
    scale = 2.0 ** torch.floor(torch.log2(448 / values.double().abs().max()))
    return ((values.double() * scale).float().to(torch.float8_e4m3fn).double() / scale).to(values.dtype)


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(24, 48, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


def test_operations_see_the_values(values: torch.Tensor) -> None:
    tensor = quantized_tensor(values, POWER_2)
    expected = rounded(values)
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor + 1, expected + 1)
    assert torch.equal(torch.cat([tensor, tensor]), torch.cat([expected, expected]))
    assert torch.equal(tensor.t() @ values, expected.t() @ values)
    assert not isinstance(tensor * 2, FP8Tensor)


def test_what_is_stored_again_does_not_change(values: torch.Tensor) -> None:
    tensor = quantized_tensor(values, POWER_2)
    again = quantized_tensor(tensor.dequantize(), POWER_2)
    assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize(
    "how", [copy.deepcopy, torch.clone, lambda x: x.to(torch.float32), lambda x: x.view(2, 12, 48)]
)
def test_copies_and_views_keep_the_codes(how: object, values: torch.Tensor) -> None:
    tensor = quantized_tensor(values, POWER_2)
    made = how(tensor)  # type: ignore[operator]
    assert isinstance(made, FP8Tensor)
    assert torch.equal(made.dequantize().reshape(24, 48).bfloat16(), tensor.dequantize())


def test_a_change_in_place_casts_again(values: torch.Tensor) -> None:
    tensor = quantized_tensor(values, POWER_2, columnwise=True)
    expected = rounded(rounded(values) * 3)
    returned = tensor.mul_(3)
    assert returned is tensor
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(
        tensor.quantized(rowwise=False, columnwise=True).columnwise.dequantize().bfloat16(), expected.t()
    )  # type: ignore[union-attr]
    tensor.copy_(values)
    assert torch.equal(tensor.dequantize(), rounded(values))


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_layer_takes_the_operands(name: str) -> None:
    """A weight that is cast as the recipe casts it gives the results of the weight itself, to the bit."""
    recipe = make_recipe(name)
    torch.manual_seed(0)
    plain = Linear(64, 48, dtype=torch.bfloat16)
    held = copy.deepcopy(plain)
    both = quantized_tensor(plain.weight, recipe.cast(Role.WEIGHT), columnwise=True)
    held.weight = nn.Parameter(both)
    results = []
    for layer in (plain, held):
        x = torch.randn(32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.backward(torch.ones_like(y))
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    for of_plain, of_held in zip(*results):
        assert torch.equal(of_plain, of_held)
        assert not isinstance(of_held, FP8Tensor)


def test_shared_memory_is_refused(values: torch.Tensor) -> None:
    layer = Linear(48, 24)
    layer.weight = nn.Parameter(quantized_tensor(values, POWER_2))
    with pytest.raises(NotImplementedError, match="state_dict"):
        layer.share_memory()


def test_parts_are_read_as_the_values(values: torch.Tensor) -> None:
    weight, expected = nn.Parameter(quantized_tensor(values, POWER_2)), rounded(values)
    with torch.no_grad():
        part = weight[2:5]
        assert torch.equal(part + 1, expected[2:5] + 1)
        assert type(part + 1) is torch.Tensor
        assert torch.equal((part * 2).add_(1), expected[2:5] * 2 + 1)
        assert torch.equal(torch.cat([*weight.chunk(3)]), expected)


def test_a_part_is_written_with_the_rest(values: torch.Tensor) -> None:
    weight, changed = nn.Parameter(quantized_tensor(values, POWER_2)), rounded(values)
    changed[2], changed[3:5, 0] = 4 * values.abs().max(), -1.5  # so that the scale changes
    with torch.no_grad():
        weight[2] = 4 * values.abs().max()
        weight[3:5, 0] = -1.5
    assert isinstance(weight, FP8Tensor)
    assert torch.equal(weight.dequantize(), rounded(changed))
