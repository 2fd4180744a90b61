"""A linear layer's pass computes by the steps that it keeps what the ops compute, one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from cuda_kernels.host.launch import executing
from lightning_fp8 import LayerNormLinear, Linear, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops import linear as linear_ops
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.gemm import scaled_mm_op
from tests.cuda_kernels.emulated import Emulator
from tests.emulator.samples import needs_gcc
from tests.tiers import every_pair, thorough

Results = list[Tensor]


@contextmanager
def by_ops() -> Iterator[None]:
    """Every pass calls the ops."""
    with patch.object(linear_ops, "_key", lambda *args: None):
        yield


@contextmanager
def noted_steps() -> Iterator[list[linear_ops.Pass]]:
    """The passes that ran steps that they kept."""
    found: list[linear_ops.Pass] = []
    steps_of = linear_ops.Pass.steps_of

    def noting(of: linear_ops.Pass, key: Any) -> Any:
        steps = steps_of(of, key)
        if steps is not None:
            found.append(of)
        return steps

    with patch.object(linear_ops.Pass, "steps_of", noting):
        yield found


@contextmanager
def on_kernels(run: bool = True) -> Iterator[None]:
    """CPU tensors are a card's: their ops are planned, and run emulated kernels, or find none."""
    with ExitStack() as stack:
        for op in (quantize_op, scaled_mm_op):
            stack.enter_context(patch.dict(op.implementations, cpu=op.implementations["cuda"]))
            stack.enter_context(patch.dict(op.plans, cpu=op.plans["cuda"]))
        stack.enter_context(patch("lightning_fp8.ops.cast.gives_a_view", lambda *operand: False))
        stack.callback(plans.clear_plan_cache)
        plans.clear_plan_cache()
        if run:
            stack.enter_context(executing(Emulator()))
        yield


def four_steps(layer: Linear, x: Tensor, dy: Tensor, recipe: str) -> Results:
    """Outputs, gradients, scales and amaxes of four steps, after the first of which delayed scaling has scales."""
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    results = []
    for _ in range(4):
        with fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        y.backward(dy)
        results += [y.detach(), *(tensor.grad.clone() for tensor in (x, *layer.parameters()))]
        optimizer.step()
        optimizer.zero_grad()
    assert layer.history is not None
    return [*results, layer.history.scale, layer.history.amax_history]


def case(rows: int, dtype: torch.dtype, bias: bool, strided: bool = False) -> tuple[Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = Linear(48, 32, bias=bias).to(dtype)
    x = torch.randn(48, rows, dtype=dtype).t() if strided else torch.randn(rows, 48, dtype=dtype)
    return layer, x, torch.randn(rows, 32, dtype=dtype)


def assert_equal_both_ways(recipe: str, arguments: tuple[Linear, Tensor, Tensor]) -> None:
    with noted_steps() as noted:
        by_steps = four_steps(*arguments, recipe)
    assert len(noted) == (4 if recipe == "delayed" else 6)  # without the first forward and backward of each cast
    with by_ops():
        expected = four_steps(*arguments, recipe)
    for ours, right in zip(by_steps, expected, strict=True):
        assert torch.equal(ours, right)


@every_pair
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_specification(recipe: str, rows: int, dtype: torch.dtype, bias: bool) -> None:
    assert_equal_both_ways(recipe, case(rows, dtype, bias))


@thorough
@needs_gcc
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_kernels(recipe: str, strided: bool) -> None:
    with on_kernels():
        assert_equal_both_ways(recipe, case(40, torch.bfloat16, True, strided))


class Readers(nn.Module):
    """Two layers of one input, the second of which gets the first one's copies, and a norm that casts for its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = Linear(48, 32), Linear(48, 32), LayerNormLinear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x))
        return y


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_that_exist(recipe: str) -> None:
    """A pass takes the copies of another layer or op; amaxes, too, are those of the ops called one by one."""

    def results() -> Results:
        torch.manual_seed(0)
        model, x = Readers(), torch.randn(40, 48, requires_grad=True)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
        for _ in range(3):
            with fp8_autocast(fp8_recipe=recipe):
                y = model(x)
            (y * torch.linspace(-1, 1, 48)).sum().backward()
            found += [y.detach(), *(each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        for layer in (model.q, model.k, model.out):
            assert layer.history is not None
            found += [layer.history.scale, layer.history.amax_history]
        return found

    with noted_steps() as noted:
        by_steps = results()
    assert len(noted) == (3 + 3) * (1 if recipe == "delayed" else 2)
    with by_ops():
        expected = results()
    assert len(by_steps) == len(expected)
    assert all(map(torch.equal, by_steps, expected))


def test_a_layer_keeps_its_steps_until_plans_are_cleared() -> None:
    layer = Linear(48, 32)

    def by_the_ops(x: Tensor, times: int = 2) -> int:
        """How many of the forwards call the ops."""
        with noted_steps() as noted:
            for _ in range(times):
                with fp8_autocast(fp8_recipe="tensorwise"):
                    assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=0.3)
        return times - len(noted)

    x = torch.randn(8, 48)
    assert by_the_ops(x) == 1
    assert by_the_ops(x.clone()) == 0
    assert by_the_ops(torch.randn(9, 48)) == 1
    assert by_the_ops(x) == 0
    layer.weight.data = 0.1 * torch.randn(33, 48)[1:]
    assert by_the_ops(x) == 0
    layer.weight.data = 0.1 * torch.randn(48, 32).t()  # cast in its memory order, and then the operand is given
    assert by_the_ops(x) == 1
    layer.weight.data = layer.weight.data.contiguous()
    assert by_the_ops(x) == 0
    layer.bias.data = torch.randn(64)[::2]
    assert by_the_ops(x) == 1
    for clear in plans.clear_plan_cache, plans.outdate:
        clear()
        assert by_the_ops(x) == 1


@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}, {"first": True}])
def test_layers_whose_gradients_go_elsewhere_keep_their_steps(options: dict[str, bool]) -> None:
    first = True if options.pop("first", False) else None
    layer = Linear(48, 32, bias=False, **options)
    layer.weight.main_grad = torch.zeros(32, 48)  # type: ignore[attr-defined]
    x = torch.randn(8, 48)
    with noted_steps() as noted:
        for is_first in (None, first, None):
            with fp8_autocast(fp8_recipe="tensorwise"):
                layer(x, is_first)
    assert len(noted) == (1 if first else 2)
    dw = 2 * (x @ layer.weight.detach().t()).t() @ x
    layer.weight.main_grad.zero_()
    with fp8_autocast(fp8_recipe="tensorwise"):
        layer(x).square().sum().backward()
    if options:
        if "delay_wgrad_compute" in options:
            layer.backward_dw()
        found = layer.weight.main_grad if "fuse_wgrad_accumulation" in options else layer.weight.grad
        assert (found - dw).norm() < 0.1 * dw.norm()


def test_a_layer_drops_steps_of_former_generations() -> None:
    layer, numbers = Linear(48, 32), []
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16), fp8_autocast(fp8_recipe="tensorwise"):
                layer(torch.randn(8, 48)).sum().backward()
        assert layer._last_products is not None
        passes = layer._last_products[0]._passes.values()
        numbers.append((len(passes), *(len(each._steps) for each in passes)))
        plans.clear_plan_cache()
    assert numbers == [(3, 1, 2, 1)] * 3  # one backward of both dtypes


def test_plans_of_given_operands_are_kept_for_each_kind_of_device() -> None:
    """On a GPU the weight is cast to another operand than on the CPU, which reads a view."""
    layer, weight = Linear(48, 32), Mock(wraps=torch.randn(32, 48), dtype=torch.float32)
    with fp8_autocast(fp8_recipe="tensorwise"):
        layer(torch.randn(8, 48)).sum().backward()
    assert layer._last_products is not None
    product = layer._last_products[0]
    x_t = product.quantize(torch.randn(8, 48), Role.INPUT, columnwise=True).columnwise
    dy = product.quantize(torch.randn(8, 32), Role.GRAD_OUTPUT, columnwise=True)
    before = len(product._passes)
    with patch.object(linear_ops.Pass, "run", return_value=(None, None, None, None)):
        for weight.is_cuda in (False, True):
            product.gradients(dy, weight, x_t, torch.float32, torch.float32)
    assert len(product._passes) == before + 2


@pytest.mark.filterwarnings("ignore:FP8 kernels do not run on cpu")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_card_without_kernels(recipe: str) -> None:
    with on_kernels(run=False):
        assert_equal_both_ways(recipe, case(40, torch.bfloat16, True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe: str) -> None:
    assert_equal_both_ways(recipe, case(0, torch.bfloat16, True))


@pytest.mark.parametrize(
    ("bias", "error"),
    [
        (torch.zeros(31), r"bias has shape \[31\]"),
        (torch.zeros(32, dtype=torch.float64), "bias is torch.float64"),
        (torch.zeros(32, device="meta"), "bias is on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_a_bias_that_an_op_refuses_is_left_to_it(bias: Tensor, error: str) -> None:
    layer = Linear(48, 32)
    layer.bias = nn.Parameter(bias)
    with fp8_autocast(), pytest.raises((TypeError, ValueError), match=error):
        layer(torch.randn(8, 48))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.to("meta") if not t.dim() else t, "scale_inv of b is on meta"),
        (lambda t: t.view(torch.int32) if not t.dim() else t, "scale_inv of b is torch.int32"),
        (lambda t: t.reshape(1) if not t.dim() else t, r"scale_inv of b has shape \[1\]"),
        (lambda t: t.to("meta") if t.shape == (32, 48) else t, "is on meta"),
        (lambda t: t[:, :4] if t.dtype == torch.float8_e4m3fn else t, "contractions differ"),
    ],
)
def test_kept_tensors_that_hooks_have_changed_are_left_to_the_ops(
    change: Callable[[Tensor], Tensor], error: str
) -> None:
    layer, x = Linear(48, 32), torch.randn(8, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change), fp8_autocast(fp8_recipe="tensorwise"):
        y = layer(x)
    with pytest.raises((TypeError, ValueError), match=error):
        y.sum().backward()


def test_a_profiler_sees_the_ops() -> None:
    layer, x = Linear(48, 32), torch.randn(8, 48, requires_grad=True)
    with torch.profiler.profile() as profile, fp8_autocast():
        layer(x).sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert "lightning_fp8::quantize" in names
    assert "lightning_fp8::scaled_mm" in names
