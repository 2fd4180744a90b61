"""The line that says that the host limits the speed, with a planted clock and planted events of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.convert import host_limit
from tests.small import Regression, fp8_trainer, regression_data


class Gpu:
    """A GPU that is ``behind`` the host by so many ms, and their common clock."""

    def __init__(self, behind: float) -> None:
        self.now, self.behind = 0.0, behind

    def clock(self) -> float:
        self.now += 1.0  # each look at the clock is 1 ms after the last one
        return self.now / 1e3

    def event(self) -> Event:
        self.now += 1.0
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.completes = gpu, gpu.now + gpu.behind

    def query(self) -> bool:
        self.gpu.now += 1.0
        return self.gpu.now > self.completes

    def elapsed_time(self, other: Event) -> float:
        assert other.gpu.now > other.completes
        return other.completes - self.completes


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    host_limit._watched = None


def plant(monkeypatch: pytest.MonkeyPatch, behind: float) -> None:
    gpu = Gpu(behind)
    monkeypatch.setattr(host_limit, "_clock", gpu.clock)
    monkeypatch.setattr(host_limit, "_event", gpu.event)
    monkeypatch.setattr(host_limit, "is_capturing", lambda: False)
    monkeypatch.setattr(host_limit, "_is_on_gpu", lambda optimizer: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lightning_fp8.convert.apply.watch_host", host_limit.watch_host)


def loop(steps: int, closure: bool = False, optimizers: int = 1) -> list[str]:
    model = convert_module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).bfloat16())
    parameters = [*model.parameters()]
    each_of = [torch.optim.SGD(parameters[first::optimizers], lr=0.01) for first in range(optimizers)]

    def loss() -> Any:
        with fp8_autocast(fp8_recipe="tensorwise"):
            found = model(torch.randn(4, 16).bfloat16()).square().mean()
        found.backward()
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            if closure:
                each_of[0].step(loss)
            else:
                loss()
                for optimizer in each_of:
                    optimizer.step()
    return [str(each.message) for each in caught if "host limits" in str(each.message)]


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("behind", "told"), [(0.5, 1), (50.0, 0)])
def test_a_gpu_that_has_caught_up_waits_for_the_host(behind: float, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, behind)
    said = loop(40)
    assert len(said) == told
    for text in said:
        # the host: begin, event, event after backward, query, clock; the GPU: three more looks
        assert "in 11 of 11 steps" in text
        assert "takes the host 4.0 ms, and the GPU 4.0 ms" in text
        assert all(way_out in text for way_out in ("reduce-overhead", "CUDA graph", "larger", "BF16"))
    assert host_limit._watched is None


@pytest.mark.usefixtures("_restored")
def test_nothing_is_said_before_step_20_or_of_steps_that_run_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 0.5)
    assert not loop(19)
    assert not loop(40, closure=True)


@pytest.mark.usefixtures("_restored")
def test_optimizers_that_step_in_turn_count_once_for_each_region(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 0.5)
    assert not loop(19, optimizers=4)
    plant(monkeypatch, 0.5)
    (text,) = loop(20, optimizers=4)
    assert "in 11 of 11 steps" in text


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("behind", "told"), [(0.5, 1), (50.0, 0)])
def test_a_trainer(behind: float, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, behind)
    said: list[str] = []
    monkeypatch.setattr("lightning_fp8.plugin.fabric.rank_zero_warn", said.append)
    fp8_trainer("tensorwise", max_epochs=8).fit(Regression(False), regression_data())
    assert len([text for text in said if "host limits the speed" in text]) == told


@pytest.mark.usefixtures("_restored")
def test_optimizers_of_a_cpu_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 0.5)
    monkeypatch.setattr(host_limit, "_is_on_gpu", lambda optimizer: False)
    assert not loop(40)
    assert host_limit._watched is not None
    assert host_limit._watched.steps == 0


@pytest.mark.usefixtures("_restored")
def test_a_conversion_does_not_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses CUDA in a process that was forked after such a look."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("it looks for a GPU"))
    host_limit.watch_host(print)


@pytest.mark.usefixtures("_restored")
def test_conversions_without_a_forward_leave_one_to_wait() -> None:
    host_limit.watch_host(print)
    before = len(host_limit.waiting)
    for _ in range(10):
        host_limit.watch_host(print)
    assert len(host_limit.waiting) == before
