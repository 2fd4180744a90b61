"""``fuse_wgrad_accumulation``: main_grad is the float64 sum over micro-batches, calls and recomputed calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import LayerNormLinear, LayerNormMLP, Linear, fp8_autocast, fp8_model_init

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


# --- What Megatron reads and sets -------------------------------------------------------------------------------------

PLACES = pytest.mark.parametrize("recipe", ["tensorwise", None])
"""In FP8, and in high precision."""


def region(recipe: str | None) -> Any:
    return nullcontext() if recipe is None else fp8_autocast(fp8_recipe=recipe)


@PLACES
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("first", [None, True, False])
def test_overwrite_main_grad(kind: Any, recipe: str | None, first: bool | None) -> None:
    """Each gradient takes the place of what is there, be it NaN; the gradient itself is that of ``grad``."""
    module, alike = (kind(16, 16, fuse_wgrad_accumulation=fused) for fused in (True, False))
    alike.load_state_dict(module.state_dict(), strict=False)
    weights = {name: value for name, value in module.named_parameters() if value.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.full((16, 16), float("nan"))  # type: ignore[attr-defined]
        weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    for _ in range(2):
        x, dy = torch.randn(4, 16), torch.randn(4, 16)
        for layer in (module, alike):
            layer.zero_grad()
            with region(recipe):
                output = layer(x, is_first_microbatch=first)
            output.backward(dy)
        for name, weight in weights.items():
            torch.testing.assert_close(weight.main_grad, alike.get_parameter(name).grad)  # type: ignore[attr-defined]


@PLACES
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("compiled", [False, True])
def test_grad_added_to_main_grad(kind: Any, recipe: str | None, compiled: bool) -> None:
    """Megatron's hook on the accumulated gradient asserts that there is one, and asks the flag whether to add it."""
    module = kind(16, 16, fuse_wgrad_accumulation=True)
    seen: dict[str, tuple[bool, bool]] = {}
    weights = {name: value for name, value in module.named_parameters() if value.dim() == 2}
    for name, weight in weights.items():
        weight.main_grad = torch.zeros(16, 16)
        weight.grad_added_to_main_grad = False

        def hook(parameter: Any, name: str = name) -> None:
            seen[name] = parameter.grad is not None and not parameter.grad.any(), parameter.grad_added_to_main_grad
            parameter.grad = None

        weight.register_post_accumulate_grad_hook(hook)
    call = torch.compile(module, backend="aot_eager") if compiled else module
    with region(recipe):
        output = call(torch.randn(4, 16))
    output.sum().backward()
    assert seen == dict.fromkeys(weights, (True, True))
    assert all(weight.main_grad.any() for weight in weights.values())


def test_zeros_that_are_added_to_are_no_others() -> None:
    """With ``zero_out_wgrad``, which Megatron sets of an embedding that is a head's weight, too."""
    layers = [layer(), layer()]
    for linear in layers:
        linear.weight.grad_added_to_main_grad = False  # type: ignore[assignment]
        linear.weight.zero_out_wgrad = True  # type: ignore[assignment]
    x = numbers(4, 16)
    with fp8_autocast(fp8_recipe="tensorwise"):
        outputs = [linear(x) for linear in layers]
    torch.autograd.backward([*outputs, layers[0].weight.sum()], [x.detach(), x.detach(), torch.tensor(1.0)])
    assert layers[0].weight.grad is not None
    assert bool((layers[0].weight.grad == 1.0).all())
    assert layers[1].weight.grad is not None
    assert not layers[1].weight.grad.any()


@PLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_main_grad_of_16_bits_is_rounded_once(dtype: torch.dtype, recipe: str | None) -> None:
    linear, x, dy = layer(), numbers(4, 16), numbers(4, 16)
    before = torch.randn(16, 16).to(dtype)
    linear.weight.main_grad = before.clone()  # type: ignore[assignment]
    with region(recipe):
        output = linear(x)
    output.backward(dy.detach())
    half_a_digit = 1.02 * torch.finfo(dtype).eps / 2
    expected = before.double() + wgrad(x, dy)
    torch.testing.assert_close(linear.weight.main_grad.double(), expected, rtol=half_a_digit, atol=1e-6)


def test_attributes_stay_where_the_parameter_stays() -> None:
    linear = layer()
    weight = linear.weight
    weight.overwrite_main_grad = True  # type: ignore[assignment]
    linear.to(torch.bfloat16).float()
    assert linear.weight is weight
    assert linear.weight.overwrite_main_grad
    assert bool((linear.weight.main_grad == 7.0).all())


@pytest.mark.parametrize("move", [lambda layer: layer.half(), lambda layer: layer.cpu(), lambda layer: layer.float()])
def test_attributes_of_an_fp8_weight_stay(move: Any) -> None:
    with fp8_model_init():
        linear = Linear(16, 16, params_dtype=torch.bfloat16)
    weight = linear.weight
    weight.overwrite_main_grad, weight.probe = True, "x"  # type: ignore[assignment]
    move(linear)
    assert linear.weight is weight
    assert (linear.weight.overwrite_main_grad, linear.weight.probe) == (True, "x")


def test_a_main_grad_that_does_not_fit() -> None:
    linear = layer()
    for wrong in (torch.zeros(16, 8), torch.zeros(16, 16, dtype=torch.float64), None):
        linear.weight.main_grad = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"needs weight.main_grad, a float32, bfloat16 or float16 tensor"):
            linear(numbers(4, 16))
