"""Linear's three GEMMs against float64, and its Transformer Engine arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import LayerNorm, Linear, RMSNorm, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES, make_recipe
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.cast import quantize_op
from tests.op_sides import note_calls
from tests.small import update_all_scales

RECIPE = pytest.mark.parametrize("recipe", RECIPES)
EPS = {"E4M3": 2.0**-4, "E5M2": 2.0**-3}
SMALLEST = {"E4M3": 2.0**-10, "E5M2": 2.0**-17}  # half of the smallest subnormal
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}


def gemm_error_bound(a: Tensor, b: Tensor, format_a: str, format_b: str, out: Tensor) -> Tensor:
    """How far ``a @ b`` of quantized operands may be from float64's, element by element.

    An element moves by half an ulp at most (eps of its value), or by half the smallest subnormal of its scaled block;
    scales are at least half of max / amax of the whole tensor, where they are rounded down to powers of two.
    """
    a, b = a.abs(), b.abs()
    error_a = a * EPS[format_a] + SMALLEST[format_a] * 2 * a.max() / LARGEST[format_a]
    error_b = b * EPS[format_b] + SMALLEST[format_b] * 2 * b.max() / LARGEST[format_b]
    return error_a @ b + a @ error_b + error_a @ error_b + 2.0**-7 * out.abs() + 1e-6 * out.abs().max().clamp(max=1)


def within(actual: Tensor, exact: Tensor, bound: Tensor) -> bool:
    return bool(((actual.double() - exact).abs() <= bound).all()) and not torch.equal(actual.double(), exact)


@RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128, 256), (37, 100, 50), (130, 129, 257), (3, 5, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_fprop_dgrad_wgrad(recipe: str, dtype: torch.dtype, shape: tuple[int, int, int], bias: bool) -> None:
    rows, inputs, outputs = shape
    linear = Linear(inputs, outputs, bias=bias, params_dtype=dtype)
    x, dy = torch.randn(rows, inputs, dtype=dtype, requires_grad=True), torch.randn(rows, outputs, dtype=dtype)
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == linear.weight.grad.dtype == dtype

    forward, backward = (make_recipe(recipe).cast(role).float8.name for role in (Role.INPUT, Role.GRAD_OUTPUT))
    x64, w64, dy64 = x.detach().double(), linear.weight.detach().double(), dy.double()
    product = x64 @ w64.t()
    exact = product + (linear.bias.detach().double() if bias else 0)
    assert within(y, exact, gemm_error_bound(x64, w64.t(), forward, forward, exact))
    dx, dw = dy64 @ w64, dy64.t() @ x64
    assert within(x.grad, dx, gemm_error_bound(dy64, w64, backward, forward, dx))
    assert within(linear.weight.grad, dw, gemm_error_bound(dy64.t(), x64, backward, forward, dw))
    if bias:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(linear.bias.grad.double(), dy64.sum(0), rtol=eps, atol=1e-5)


def test_each_operand_is_scaled_by_its_own_delayed_scale() -> None:
    recipe = make_recipe("delayed")
    linear = Linear(64, 48, bias=False)
    nn.init.normal_(linear.weight, std=1e-4)
    x, dy = 1e3 * torch.randn(32, 64), 1e-7 * torch.randn(32, 48)  # a scale taken for another's saturates or flushes
    for _ in range(2):
        linear.weight.grad, leaf = None, x.clone().requires_grad_()
        with fp8_autocast(fp8_recipe=recipe):
            y = linear(leaf)
        y.backward(dy)
        update_all_scales(recipe)  # the second pass casts by what the first one saw
    x64, w64, dy64 = x.double(), linear.weight.detach().double(), dy.double()
    assert within(y, x64 @ w64.t(), gemm_error_bound(x64, w64.t(), "E4M3", "E4M3", x64 @ w64.t()))
    assert within(leaf.grad, dy64 @ w64, gemm_error_bound(dy64, w64, "E5M2", "E4M3", dy64 @ w64))
    assert within(linear.weight.grad, dy64.t() @ x64, gemm_error_bound(dy64.t(), x64, "E5M2", "E4M3", dy64.t() @ x64))


@RECIPE
@pytest.mark.parametrize("leading", [(), (2, 3, 4), (0,), (2, 0)])
def test_leading_dimensions(recipe: str, leading: tuple[int, ...]) -> None:
    linear = Linear(24, 12)
    x = torch.randn(*leading, 24, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        y = linear(x)
    y.sum().backward()  # its gradient is expanded, not contiguous
    assert y.shape == (*leading, 12)
    assert x.grad.shape == x.shape
    reference = F.linear(x.detach().double(), linear.weight.detach().double(), linear.bias.detach().double())
    torch.testing.assert_close(y.detach().double(), reference, rtol=0.1, atol=0.2)
    flat = x.detach().reshape(-1, 24).double()
    torch.testing.assert_close(
        linear.weight.grad.double(), torch.ones(12, len(flat)).double() @ flat, rtol=0.1, atol=0.5
    )
    assert torch.equal(linear.bias.grad, torch.full((12,), float(len(flat))))


@RECIPE
def test_non_contiguous_input(recipe: str) -> None:
    linear, x = Linear(40, 20), torch.randn(40, 33).t()
    with fp8_autocast(fp8_recipe=recipe), torch.no_grad():
        assert torch.equal(linear(x), linear(x.contiguous()))


@RECIPE
def test_under_torch_autocast_with_float32_weights(recipe: str) -> None:
    linear, x = Linear(64, 32), torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), fp8_autocast(fp8_recipe=recipe):
        y = linear(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.detach().float(), F.linear(x, linear.weight, linear.bias).detach(), rtol=0.1, atol=0.2)


@RECIPE
def test_outside_autocast_it_is_nn_linear(recipe: str) -> None:
    linear, x = Linear(20, 10), torch.randn(4, 20)
    with fp8_autocast(enabled=False, fp8_recipe=recipe):
        assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


@RECIPE
def test_backward_keeps_the_fp8_activation_and_the_weight_parameter(recipe: str) -> None:
    linear, x, kept = Linear(64, 32), torch.randn(16, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):  # noqa: SIM117
        with fp8_autocast(fp8_recipe=recipe):
            linear(x)
    activations = [t for t in kept if t.numel() == x.numel()]
    assert [t.dtype for t in activations] == [torch.float8_e4m3fn]
    assert any(t is linear.weight or t.data_ptr() == linear.weight.data_ptr() for t in kept)
    assert all(t.element_size() == 1 or t.numel() <= 32 * 64 for t in kept)


def test_state_dict_is_nn_linears_both_ways() -> None:
    ours, theirs = Linear(8, 4), nn.Linear(8, 4)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(nn.Linear(8, 4).state_dict(), strict=True)


def test_a_copy_has_a_history_of_its_own() -> None:
    linear = Linear(8, 4)
    twin = copy.deepcopy(linear)
    with fp8_autocast():
        twin(torch.randn(2, 8))
    assert twin.slots[Role.INPUT].amax > 0
    assert linear.slots[Role.INPUT].amax == 0


def test_seen_is_the_maximum_over_calls_and_only_of_training() -> None:
    linear = Linear(8, 4)
    first, second = torch.randn(2, 8), 3 * torch.randn(5, 8)
    with fp8_autocast():
        with torch.no_grad():
            linear(100 * first)
        assert linear.slots[Role.INPUT].amax == 0
        linear(first)
        linear(second)
        linear(first)
    expected = max(first.abs().max(), second.abs().max())
    assert linear.slots[Role.INPUT].amax == expected
    assert linear.slots[Role.WEIGHT].amax == linear.weight.abs().max()


def test_return_bias_leaves_the_addition_to_the_caller() -> None:
    linear, x = Linear(16, 8, return_bias=True), torch.randn(4, 16)
    for enabled in (True, False):
        with fp8_autocast(enabled=enabled, fp8_recipe="tensorwise"):
            y, bias = linear(x)
        assert bias is linear.bias
        torch.testing.assert_close(y, F.linear(x, linear.weight), rtol=0.1, atol=0.2)


@pytest.mark.parametrize("split", [("query_", "key_", "value_"), {"query": 4, "key": 4, "value": 4}])
def test_parameters_split(split: Any) -> None:
    torch.manual_seed(3)
    whole = Linear(16, 12)
    torch.manual_seed(3)
    parts, x = Linear(16, 12, parameters_split=split), torch.randn(5, 16)
    names = [f"{part}_{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")]
    assert list(parts.state_dict()) == names
    outputs = []
    for linear in (whole, parts):
        with fp8_autocast(fp8_recipe="tensorwise"):
            y = linear(x)
        y.square().sum().backward()
        outputs.append(y)
    assert torch.equal(*outputs)
    gradient = torch.cat([parts.query_weight.grad, parts.key_weight.grad, parts.value_weight.grad])
    assert torch.equal(gradient, whole.weight.grad)
    uneven = Linear(16, 12, bias=False, parameters_split={"a": 2, "b": 10})
    assert [tuple(p.shape) for p in uneven.parameters()] == [(2, 16), (10, 16)]


def test_init_method_and_params_dtype() -> None:
    linear = Linear(8, 4, init_method=lambda weight: weight.fill_(0.5), params_dtype=torch.bfloat16)
    assert (linear.weight == 0.5).all()
    assert linear.weight.dtype == linear.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_weight_is_cast_once_for_all_micro_batches_until_it_changes(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts: list[torch.Size] = []
    note_calls(monkeypatch, quantize_op, lambda x, *others: casts.append(x.shape))
    linear, x = Linear(16, 8), torch.randn(4, 16, requires_grad=True)
    plain = copy.deepcopy(linear)
    optimizer = torch.optim.SGD(linear.parameters(), 0.003)

    def step(first: bool | None, module: Linear = linear) -> Tensor:
        with fp8_autocast(fp8_recipe=recipe):
            y = module(x, is_first_microbatch=first)
        y.sum().backward()
        return y.detach()

    outputs = [step(True), step(False), step(False)]
    assert casts.count(linear.weight.shape) == 1
    assert casts.count(x.shape) == 3
    if recipe == "blockwise":  # no state: the same values as without a cache
        assert all(torch.equal(output, step(None, plain)) for output in outputs)
    casts.clear()
    optimizer.step()
    after = step(False)
    assert casts.count(linear.weight.shape) == 1
    assert not torch.equal(after, outputs[0])
    with torch.no_grad():
        exact = F.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(after, exact, rtol=0.1, atol=0.2)


@RECIPE
def test_wgrad_accumulates_into_main_grad(recipe: str) -> None:
    linear, x = Linear(16, 8, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16), torch.randn(4, 16).bfloat16()
    plain = Linear(16, 8, params_dtype=torch.bfloat16)
    plain.load_state_dict(linear.state_dict())
    linear.weight.main_grad = torch.full((8, 16), 7.0)
    for _ in range(2):
        for module in (linear, plain):
            module.weight.grad = None
            with fp8_autocast(fp8_recipe=recipe):
                y = module(x)
            y.sum().backward()
    assert linear.weight.grad is None
    torch.testing.assert_close(linear.weight.main_grad, 7.0 + 2 * plain.weight.grad.float(), rtol=2e-2, atol=5e-2)
    with fp8_autocast(fp8_recipe=recipe):
        linear(x, is_first_microbatch=True).sum().backward()  # the first micro-batch starts anew
    torch.testing.assert_close(linear.weight.main_grad, plain.weight.grad.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(dtype: torch.dtype, zero_centered: bool) -> None:
    x = (3 + 2 * torch.randn(5, 4, 24)).to(dtype)
    options: dict[str, Any] = {"eps": 1e-3, "zero_centered_gamma": zero_centered, "params_dtype": dtype}
    layer, rms = LayerNorm(24, **options), RMSNorm(hidden_size=24, **options)
    assert (layer.weight == (0 if zero_centered else 1)).all()
    with torch.no_grad():
        for parameter in (*layer.parameters(), *rms.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    x64 = x.double()
    gammas = [norm.weight.detach().double() + zero_centered for norm in (layer, rms)]
    centered = x64 - x64.mean(-1, keepdim=True)
    expected = [
        centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gammas[0] + layer.bias.detach().double(),
        x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gammas[1],
    ]
    for norm, exact in zip((layer, rms), expected):
        y = norm(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert LayerNorm(24, elementwise_affine=False)(x).dtype == dtype
    assert "weight" not in RMSNorm(24, elementwise_affine=False).state_dict()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_without_gradients_nothing_is_cast_for_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    note_calls(monkeypatch, quantize_op, lambda x, cast, *others: asked.append(cast.columnwise))
    layer, x = Linear(64, 32), torch.randn(8, 64)
    with fp8_autocast(fp8_recipe=recipe), torch.no_grad():
        layer(x)
    assert asked == [False, False]
    with fp8_autocast(fp8_recipe=recipe):
        layer(x)
    assert asked == [False, False, True, False]
