"""Training without Lightning resumes to the bit, as the documentation writes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import DelayedScaling, Linear, convert_module, fp8_autocast, fp8_state_dict, load_fp8_state_dict
from tests.docs.pages import ROOT, blocks
from tests.small import mlp

START = ROOT / "docs" / "start.md"


class WithLoss(nn.Module):
    """The mean square of an MLP's output: what the page calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


def batches(start: int, stop: int) -> list[Tensor]:
    """Inputs that grow from step to step, so that every step's amax counts."""
    return [
        (1 + step) * torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) for step in range(start, stop)
    ]


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that training has made, as copies."""
    return copy.deepcopy({**model.state_dict(), **fp8_state_dict(model)})


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert torch.equal(value, two[key]) if isinstance(value, Tensor) else value == two[key], key


def test_the_loop_of_the_docs_resumes_to_the_bit(tmp_path: Path) -> None:
    (snippet,) = (block.text for block in blocks(START, "python") if "load_fp8_state_dict(" in block.text)

    def train(data: list[Tensor], path: Path) -> dict[str, Any]:
        torch.manual_seed(7)
        model = WithLoss()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        exec(snippet, {"torch": torch, "model": model, "optimizer": optimizer, "data": data, "path": path})
        return state(model)

    straight = train(batches(0, 8), tmp_path / "straight.pt")
    half = train(batches(0, 4), tmp_path / "half.pt")
    assert not torch.equal(half["scale"], straight["scale"])
    assert_same(train(batches(4, 8), tmp_path / "half.pt"), straight)
    assert (straight["scale"] > 0).all()


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("converted", [False, True], ids=["our modules", "converted"])
def test_micro_batches_and_intervals_go_on_where_they_stopped(
    converted: bool, interval: int, stop: int, tmp_path: Path
) -> None:
    recipe = DelayedScaling(amax_history_len=5, interval=interval)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = convert_module(mlp()) if converted else mlp(Linear)
        return model, torch.optim.Adam(model.parameters(), 1e-2)

    def train(model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            for batch in batches(step, step + 1)[0].split(4):
                with fp8_autocast(fp8_recipe=recipe):
                    y = model(batch)
                y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = build()
    train(straight, optimizer, 0, 7)
    expected = state(straight)
    half, optimizer = build()
    train(half, optimizer, 0, stop)
    before = state(half)
    torch.save([half.state_dict(), optimizer.state_dict(), fp8_state_dict(half)], tmp_path / "half.pt")
    weights, moments, fp8 = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed, optimizer = build()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    assert load_fp8_state_dict(resumed, fp8) == []
    assert_same(state(resumed), before)
    train(resumed, optimizer, stop, 7)
    assert_same(state(resumed), expected)


@pytest.mark.parametrize("interval", [1, 2])
def test_an_earlier_state_whose_last_step_waits_for_its_update_resumes_to_the_bit(interval: int) -> None:
    """Earlier versions updated where the next region began, and saved amaxes and a count of steps until then."""
    recipe = DelayedScaling(amax_history_len=5, interval=interval)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = mlp(Linear)
        return model, torch.optim.Adam(model.parameters(), 1e-2)

    def observe(model: nn.Module, step: int) -> None:
        with fp8_autocast(fp8_recipe=recipe):
            y = model(batches(step, step + 1)[0])
        y.square().mean().backward()

    straight, optimizer = build()
    for step in range(6):
        observe(straight, step)
        if step == 3:
            waiting = {**copy.deepcopy(fp8_state_dict(straight)), "steps": 1}
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            saved = copy.deepcopy([straight.state_dict(), optimizer.state_dict()])
    assert (waiting["seen"] > 0).all()
    resumed, optimizer = build()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert load_fp8_state_dict(resumed, waiting) == []
    for step in (4, 5):
        observe(resumed, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(state(resumed), state(straight))


def test_an_earlier_state_without_waiting_amaxes_loads() -> None:
    linear = Linear(16, 8)
    old = {"names": ["input", "weight"], "scale": torch.ones(2), "amax_history": torch.ones(3, 2), "updates": 4}
    assert load_fp8_state_dict(linear, old) == ["grad_output"]
    loaded = fp8_state_dict(linear)
    assert loaded["scale"].tolist() == [1, 1, 0]
    assert loaded["counts"].tolist() == [4, 4, 0]
    assert not loaded["seen"].any()
    assert loaded["steps"] == -1


@pytest.mark.parametrize(("saved", "loaded"), [(-1, None), (0, 0), (2, 2)])
def test_files_hold_an_unknown_number_of_steps_as_before(saved: int, loaded: int | None) -> None:
    linear = Linear(16, 8)
    load_fp8_state_dict(linear, {**fp8_state_dict(linear), "steps": saved})
    assert linear.history is not None
    assert linear.history.steps == loaded
    assert fp8_state_dict(linear)["steps"] == linear.history.state_dict()["steps"] == saved


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seen", torch.zeros(2), r"'seen' has shape \(2,\) for 3 names"),
        ("counts", torch.zeros(3, dtype=torch.float64), "'counts' must be a float32 tensor, not torch.float64"),
        ("seen", torch.zeros(3, device="meta"), "'seen' must be a dense tensor that is not on meta"),
        ("counts", torch.zeros(3, device="meta"), "'counts' must be a dense tensor that is not on meta"),
        ("counts", torch.tensor([1.0, torch.nan, 1.0]), "'counts' holds negative, infinite or NaN values"),
        ("counts", torch.tensor([1.0, -1.0, 1.0]), "'counts' holds negative, infinite or NaN values"),
        ("steps", True, "'steps' must be a count or -1, not True"),
    ],
)
def test_a_damaged_state_changes_nothing(key: str, value: Any, message: str) -> None:
    linear = Linear(16, 8)
    before = state(linear)
    with pytest.raises(ValueError, match=message):
        load_fp8_state_dict(linear, {**fp8_state_dict(linear), "scale": torch.ones(3), key: value})
    assert_same(state(linear), before)


def test_amaxes_that_wait_may_be_infinite() -> None:
    linear = Linear(16, 8)
    with fp8_autocast():
        linear(torch.full((2, 16), torch.inf))
    other = Linear(16, 8)
    load_fp8_state_dict(other, fp8_state_dict(linear))
    assert other.slots[other.roles[0]].amax == torch.inf
