"""A region belongs to its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import Linear, convert_module, fp8_autocast, fp8_region, update_fp8_scales
from lightning_fp8.numerics.recipes import RECIPES
from tests.small import Regression, fp8_trainer, regression_data


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` gives in a thread of its own."""
    given: list[Any] = []
    thread = threading.Thread(target=lambda: given.append(function()))
    thread.start()
    thread.join()
    assert given, "the thread failed"
    return given[0]


def exact(linear: Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_region_is_not_another_threads(compiled: bool) -> None:
    linear, x = Linear(64, 32), torch.randn(8, 64)
    torch._dynamo.reset()
    run = torch.compile(linear, backend="eager", fullgraph=True) if compiled else linear
    high = exact(linear, x)
    with fp8_autocast(fp8_recipe="tensorwise"):
        here = run(x)
        assert torch.equal(in_a_thread(lambda: run(x)), high)

        def with_a_region_of_its_own() -> tuple[Tensor, Tensor]:
            with fp8_autocast(fp8_recipe="mxfp8"):
                inside = run(x)
            return inside, run(x)

        inside, after = in_a_thread(with_a_region_of_its_own)
        assert torch.equal(run(x), here)
    assert torch.equal(after, high)
    assert torch.equal(run(x), high)
    assert not torch.equal(here, high)
    assert not torch.equal(inside, high)
    assert not torch.equal(inside, here)


@pytest.mark.parametrize("own", [False, True])
def test_work_that_waits_for_a_forward_may_end_in_two_threads_at_once(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first requests to a server do: both threads see the work, and both remove it."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    convert_module(model, recipe="tensorwise" if own else None)
    monkeypatch.setattr(fp8_region, "waiting", waiting := [])
    x, main = torch.randn(8, 32), threading.current_thread()

    def run() -> Tensor:
        with nullcontext() if own else fp8_autocast(fp8_recipe="tensorwise"):
            y: Tensor = model(x)
        return y

    waiting.append(lambda: threading.current_thread() is not main or in_a_thread(run).isfinite().all())
    assert run().isfinite().all()
    assert not waiting


def test_threads_inside_one_decorated_function_leave_their_own_regions() -> None:
    linear, x = Linear(64, 32), torch.randn(8, 64)
    first_inside, both_inside, first_has_left = (threading.Event() for _ in range(3))

    @fp8_autocast(fp8_recipe="mxfp8")
    def decorated(inside: threading.Event, may_leave: threading.Event) -> None:
        inside.set()
        assert may_leave.wait(60)

    def first() -> None:
        decorated(first_inside, both_inside)
        given.append(linear(x))
        first_has_left.set()

    given: list[Tensor] = []
    thread = threading.Thread(target=first)
    with fp8_autocast(fp8_recipe="tensorwise"):
        before = linear(x)
        thread.start()
        assert first_inside.wait(60)
        decorated(both_inside, first_has_left)
        assert torch.equal(linear(x), before)
    thread.join()
    assert torch.equal(given[0], exact(linear, x))
    assert torch.equal(linear(x), exact(linear, x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_side_by_side_compute_as_alone(recipe: str) -> None:
    layers = {name: Linear(64, 32) for name in RECIPES}
    x = torch.randn(8, 64)
    alone = {}
    for name, layer in layers.items():
        with torch.no_grad(), fp8_autocast(fp8_recipe=name):
            alone[name] = layer(x)
    together: dict[str, list[Tensor]] = {name: [] for name in layers}
    barrier = threading.Barrier(len(layers))

    def work(name: str) -> None:
        with torch.no_grad(), fp8_autocast(fp8_recipe=name):
            for _ in range(5):
                barrier.wait()  # every thread is inside its region now
                together[name].append(layers[name](x))

    threads = [threading.Thread(target=work, args=(name,)) for name in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together[recipe]) == 5
    assert all(torch.equal(y, alone[recipe]) for y in together[recipe])


def test_an_inner_threads_region_is_outermost_there() -> None:
    """Whether a region updates is asked in its own thread too."""
    linear, x = Linear(16, 8), torch.randn(4, 16)
    with fp8_autocast():
        y = linear(x)
    y.sum().backward()
    torch.optim.SGD(linear.parameters(), 0.1).step()

    def region() -> bool:
        with fp8_autocast():
            return bool(linear.slots[linear.roles[0]].scale > 0)

    with fp8_autocast(fp8_recipe="tensorwise"):
        assert in_a_thread(region)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_in_another_thread_repeats_its_forward(recipe: str, reentrant: bool) -> None:
    """Autograd has threads of its own for devices; here the whole backward pass runs in one."""
    linear, x = Linear(64, 32), torch.randn(8, 64, requires_grad=True)

    def gradients(recompute: bool, elsewhere: bool) -> tuple[Tensor, ...]:
        with fp8_autocast(fp8_recipe=recipe):
            y = checkpoint(linear, x, use_reentrant=reentrant) if recompute else linear(x)

        def backward() -> tuple[Tensor, ...]:
            linear.zero_grad()
            x.grad = None
            y.square().sum().backward()
            return x.grad, linear.weight.grad, linear.bias.grad

        return in_a_thread(backward) if elsewhere else backward()

    gradients(False, False)
    update_fp8_scales(linear)  # from here on the scales stand
    expected = gradients(False, False)
    for recompute in (False, True):
        assert all(torch.equal(one, two) for one, two in zip(gradients(recompute, True), expected))


def test_the_trainer_recomputes_compiled_layers_in_the_thread_that_has_the_setting() -> None:
    """A card's backward pass has a thread of its own, which has no setting: compiled code reads the current one."""
    enabled: list[bool] = []

    class Compiled(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: enabled.append(torch._C._is_multithreading_enabled()))
            return loss

    model = Compiled()
    model.net[2].compile(backend="eager")
    fp8_trainer().fit(model, regression_data())
    assert enabled == [False] * 4
    assert torch._C._is_multithreading_enabled()
