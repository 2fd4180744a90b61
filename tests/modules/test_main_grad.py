"""``fuse_wgrad_accumulation``: main_grad is the float64 sum over micro-batches, calls and recomputed calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import LayerNormLinear, LayerNormMLP, Linear, fp8_autocast

Call = Callable[[Linear, Tensor, bool], Tensor]
MICRO_BATCHES = 3


def plainly(linear: Linear, x: Tensor, first: bool) -> Tensor:
    return linear(x, is_first_microbatch=first)  # type: ignore[return-value]


def reentrant(linear: Linear, x: Tensor, first: bool) -> Tensor:
    return checkpoint(linear, x, first, use_reentrant=True)  # type: ignore[no-any-return]


def non_reentrant(linear: Linear, x: Tensor, first: bool) -> Tensor:
    return checkpoint(linear, x, first, use_reentrant=False)  # type: ignore[no-any-return]


CALLS = pytest.mark.parametrize("call", [plainly, reentrant, non_reentrant])


def numbers(*shape: int) -> Tensor:
    """Numbers that FP8 holds exactly under any scale that brings 2 to the largest: 0, ±1/2, ±1 and ±2, with a 2."""
    drawn = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])[torch.randint(7, shape)]
    drawn[0, 0] = 2.0
    return drawn.requires_grad_()


def layer() -> Linear:
    linear = Linear(16, 16, bias=False, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.full((16, 16), 7.0)  # type: ignore[assignment]
    return linear


def wgrad(x: Tensor, dy: Tensor) -> Tensor:
    return dy.detach().double().t() @ x.detach().double()


def assert_main_grad(linear: Linear, expected: Tensor) -> None:
    torch.testing.assert_close(linear.weight.main_grad.double(), expected, rtol=1e-5, atol=1e-4)


@CALLS
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_calls_and_micro_batches_add_up_from_the_first_on(call: Call, calls: int) -> None:
    linear = layer()
    for _ in range(2):  # steps: each starts anew
        expected = torch.zeros(16, 16, dtype=torch.float64)
        for micro_batch in range(MICRO_BATCHES):
            pairs = [(numbers(4, 16), numbers(4, 16)) for _ in range(calls)]
            with fp8_autocast(fp8_recipe="tensorwise"):
                outputs = [call(linear, x, micro_batch == 0) for x, _ in pairs]
            torch.autograd.backward(outputs, [dy.detach() for _, dy in pairs])
            expected += sum(wgrad(x, dy) for x, dy in pairs)
            assert_main_grad(linear, expected)


@CALLS
def test_without_a_first_micro_batch_everything_is_added(call: Call) -> None:
    linear, x, dy = layer(), numbers(4, 16), numbers(4, 16)
    with fp8_autocast(fp8_recipe="tensorwise"):
        call(linear, x, False).backward(dy.detach())
    assert_main_grad(linear, 7.0 + wgrad(x, dy))


@CALLS
def test_backward_passes_in_another_order(call: Call) -> None:
    """As a pipeline has them: forward, forward, backward of the second, backward of the first."""
    linear = layer()
    pairs = [(numbers(4, 16), numbers(4, 16)) for _ in range(2)]
    with fp8_autocast(fp8_recipe="tensorwise"):
        outputs = [call(linear, x, index == 0) for index, (x, _) in enumerate(pairs)]
    for output, (_, dy) in reversed(list(zip(outputs, pairs))):
        output.backward(dy.detach())
    assert_main_grad(linear, wgrad(*pairs[0]) + wgrad(*pairs[1]))


def test_a_weight_of_two_layers() -> None:
    first, second = layer(), layer()
    second.weight = first.weight
    pairs = [(numbers(4, 16), numbers(4, 16)) for _ in range(2)]
    with fp8_autocast(fp8_recipe="tensorwise"):
        outputs = [linear(x, is_first_microbatch=True) for linear, (x, _) in zip((first, second), pairs)]
    torch.autograd.backward(outputs, [dy.detach() for _, dy in pairs])
    assert_main_grad(first, wgrad(*pairs[0]) + wgrad(*pairs[1]))


def test_a_forward_alone_leaves_main_grad() -> None:
    linear, x = layer(), numbers(4, 16)
    with fp8_autocast(fp8_recipe="tensorwise"):
        linear(x, is_first_microbatch=True)
        with torch.no_grad():
            linear.eval()(x, is_first_microbatch=True)
    assert bool((linear.weight.main_grad == 7.0).all())


def calibrating(module: Any) -> Any:
    return fp8_autocast(enabled=False, calibrating=True)


def left_in_high_precision(module: Any) -> Any:
    module.fp8 = False
    return fp8_autocast(fp8_recipe="tensorwise")


@pytest.mark.parametrize("surroundings", [lambda module: nullcontext(), calibrating, left_in_high_precision])
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("compiled", [False, True])
def test_in_high_precision(kind: Any, surroundings: Any, compiled: bool) -> None:
    """As everywhere else: it starts anew with the first micro-batch, and ``grad`` stays empty."""
    module, alike = (kind(16, 16, fuse_wgrad_accumulation=fused) for fused in (True, False))
    alike.load_state_dict(module.state_dict(), strict=False)
    weights = [name for name, value in module.named_parameters() if value.dim() == 2]
    for name in weights:
        module.get_parameter(name).main_grad = torch.full((16, 16), 7.0)
    call = torch.compile(module, backend="aot_eager") if compiled else module
    for first in (True, False):
        x, dy = torch.randn(4, 16), torch.randn(4, 16)
        with surroundings(module):
            call(x, is_first_microbatch=first).backward(dy)
        alike(x).backward(dy)
    for name, value in module.named_parameters():
        expected = alike.get_parameter(name).grad
        assert (value.grad is None) == (name in weights), name
        torch.testing.assert_close(value.main_grad if name in weights else value.grad, expected)
