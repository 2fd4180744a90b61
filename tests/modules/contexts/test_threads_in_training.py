"""Threads beside the one that trains, and those that would leave a region without telling."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, LayerNormLinear, Linear, fp8_autocast, fp8_state_dict, update_fp8_scales
from lightning_fp8.delayed.history import all_histories
from tests.modules.contexts.test_threads import in_a_thread

RECIPES = {"a": DelayedScaling(amax_history_len=4), "b": DelayedScaling(margin=1, amax_history_len=4)}


@pytest.fixture
def threads_switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def numbers_of_training(model: nn.Module, name: str, barrier: threading.Barrier | None = None) -> list[Tensor]:
    """Every output of four steps of two micro-batches, and the scales after them."""
    optimizer, numbers = torch.optim.SGD(model.parameters(), 0.1), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(4, 16, generator=generator)
            if barrier is not None:
                barrier.wait()  # all begin their regions at once
            with fp8_autocast(fp8_recipe=RECIPES[name]):
                y = model(x)
            y.square().mean().backward()
            numbers.append(y.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    state = fp8_state_dict(model)
    return [*numbers, state["scale"], state["amax_history"], *(p.detach().clone() for p in model.parameters())]


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(LayerNormLinear(16, 16) for _ in range(6)))


@pytest.mark.usefixtures("threads_switch_often")
def test_threads_that_train_at_once_train_as_alone() -> None:
    alone = {name: numbers_of_training(model_of(seed), name) for seed, name in enumerate(RECIPES)}
    models = {name: model_of(seed) for seed, name in enumerate(RECIPES)}
    barrier, together = threading.Barrier(len(RECIPES)), dict[str, list[Tensor]]()

    def work(name: str) -> None:
        together[name] = numbers_of_training(models[name], name, barrier)

    threads = [threading.Thread(target=work, args=(name,)) for name in RECIPES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, expected in alone.items():
        assert len(together[name]) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(together[name], expected)), name


def test_models_are_made_while_another_thread_looks_at_all() -> None:
    kept: list[Any] = [Linear(1, 1) for _ in range(50)]
    made, failed = threading.Event(), []

    def look() -> None:
        try:
            while not made.is_set():
                all_histories()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    kept += [Linear(1, 1) for _ in range(50)]
    made.set()
    thread.join()
    assert not failed
    indices = [history.creation_index for history in all_histories()]
    assert indices == sorted(set(indices))
    assert len(indices) >= len(kept)


def test_replicas_of_data_parallel_are_refused_where_they_would_leave_the_region() -> None:
    module = nn.Sequential(LayerNormLinear(16, 16))
    assert isinstance(module[0]._replicate_for_data_parallel(), LayerNormLinear)
    with fp8_autocast(), pytest.raises(RuntimeError, match=r"LayerNormLinear would run in high precision .* 'ddp'|ddp"):
        module[0]._replicate_for_data_parallel()


@pytest.mark.parametrize("calibrating", [False, True])
def test_a_compiled_model_gets_scales_in_another_thread_than_the_one_that_made_it(calibrating: bool) -> None:
    """Compiled code does not tell that it observes."""
    torch._dynamo.reset()
    linear = Linear(16, 8)
    compiled = torch.compile(linear, backend="eager")

    def train() -> float:
        for _ in range(2):  # without an optimizer of torch
            with fp8_autocast(enabled=not calibrating, calibrating=calibrating):
                y = compiled(torch.ones(4, 16))
            y.sum().backward()
            if not calibrating:
                update_fp8_scales(linear)
        return float(linear.slots[linear.roles[0]].scale)

    assert in_a_thread(train) == 448.0


def test_a_compiled_model_is_calibrated_while_another_thread_is_inside_a_region() -> None:
    torch._dynamo.reset()
    linear = Linear(16, 8)
    compiled = torch.compile(linear, backend="eager")

    def calibrate() -> float:
        with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True):
            compiled(torch.ones(4, 16))
        return float(linear.slots[linear.roles[0]].scale)

    with fp8_autocast():
        assert in_a_thread(calibrate) == 448.0


def test_a_model_that_is_calibrated_without_gradients_is_not_updated_by_another_thread() -> None:
    linear, x = Linear(16, 8), torch.ones(4, 16)

    def enter() -> int:
        with fp8_autocast():
            return int(fp8_state_dict(linear)["updates"])

    with torch.no_grad(), fp8_autocast(enabled=False, calibrating=True):
        assert in_a_thread(enter) == 0  # before its first forward
        linear(x)
    assert float(linear.slots[linear.roles[0]].scale) == 448.0


def test_an_inference_whose_region_lies_inside_compiled_code_is_one_graph() -> None:
    torch._dynamo.reset()
    linear, recipe, x = Linear(16, 8), DelayedScaling(), torch.ones(4, 16)

    @torch.compile(backend="eager", fullgraph=True)
    def infer(x: Tensor) -> Tensor:
        with fp8_autocast(fp8_recipe=recipe):
            return linear(x)

    with torch.no_grad():
        y = infer(x)
        with fp8_autocast(fp8_recipe=recipe):
            assert torch.equal(y, linear(x))
