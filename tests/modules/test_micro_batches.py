"""``is_first_microbatch``: a kept FP8 weight lives until something may have changed the weight it was cast from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lightning_fp8.modules.weight_cache
from lightning_fp8 import Linear, fp8_autocast, update_fp8_scales
from lightning_fp8.modules.weight_cache import _KeptWeight


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each weight that was cast to be kept."""
    made: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return _KeptWeight(*args, **kwargs)

    monkeypatch.setattr(lightning_fp8.modules.weight_cache, "_KeptWeight", counted)
    return made


def run(linear: Linear, x: Tensor, first: bool | None) -> Tensor:
    with fp8_autocast(fp8_recipe="tensorwise"):
        return linear(x, is_first_microbatch=first)


def assigned(linear: Linear, new: Tensor) -> None:
    linear.load_state_dict({"weight": new, "bias": linear.bias.detach()}, assign=True)


def loaded(linear: Linear, new: Tensor) -> None:
    version = linear.weight._version
    with torch.autograd._unsafe_preserve_version_counter(linear.weight):  # as FSDP2 and DTensors do
        linear.load_state_dict({"weight": new, "bias": linear.bias.detach()})
    assert linear.weight._version == version


def in_place(linear: Linear, new: Tensor) -> None:
    with torch.no_grad():
        linear.weight.copy_(new)


def other_data(linear: Linear, new: Tensor) -> None:
    linear.weight.data = new


class ByData(torch.optim.Optimizer):
    """An optimizer of the old school."""

    def __init__(self, linear: Linear, new: Tensor) -> None:
        super().__init__([linear.weight], {})
        self.new = new

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].data.copy_(self.new)


def stepped(linear: Linear, new: Tensor) -> None:
    version = linear.weight._version
    ByData(linear, new).step()
    assert linear.weight._version == version


CHANGES = [assigned, loaded, in_place, other_data]


@pytest.mark.parametrize(("change", "frozen"), [*((each, on) for each in CHANGES for on in (0, 1)), (stepped, 0)])
def test_a_changed_weight_is_cast_anew(change: Callable[[Linear, Tensor], None], frozen: int, casts: list[int]) -> None:
    linear, fresh, x = Linear(16, 8), Linear(16, 8), torch.randn(4, 16)
    linear.weight.requires_grad_(not frozen)
    fresh.load_state_dict(linear.state_dict())
    assert torch.equal(run(linear, x, True), run(fresh, x, None))
    assert torch.equal(run(linear, x, False), run(fresh, x, None))
    assert len(casts) == 1
    change(linear, -2 * linear.weight.detach())
    with torch.no_grad():
        fresh.weight.mul_(-2)
    y = run(linear, x, False)
    assert torch.equal(y, run(fresh, x, None))
    torch.testing.assert_close(y, F.linear(x, fresh.weight, fresh.bias), rtol=0.1, atol=0.2)
    run(linear, x, False)
    assert len(casts) == 2


def a_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()


def test_a_frozen_weight_outlives_steps_until_it_is_trained(casts: list[int]) -> None:
    linear, x = Linear(16, 8).requires_grad_(False), torch.randn(4, 16)
    run(linear, x, True)
    a_step()
    run(linear, x, False)
    assert len(casts) == 1
    linear.requires_grad_(True)
    expected = run(linear, x, False)
    assert len(casts) == 2
    run(linear, x, False)
    a_step()
    assert torch.equal(run(linear, x, False), expected)
    assert len(casts) == 3
    update_fp8_scales(linear.requires_grad_(False))  # which drops copies, for those who write to ``data``
    with torch.no_grad():
        linear.weight.data.mul_(-2)
        linear.bias.data.mul_(-2)
    assert torch.equal(run(linear, x, False), -2 * expected)


def test_a_state_dict_is_loaded_by_swapping_tensors(casts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``set_swap_module_params_on_conversion`` asks; torch does not swap tensors that have weak references."""
    linear, x = Linear(16, 8), torch.randn(4, 16)
    run(linear, x, True)
    expected = {name: -2 * each for name, each in linear.state_dict().items()}
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    linear.load_state_dict(expected)
    assert all(torch.equal(each, expected[name]) for name, each in linear.state_dict().items())
    assert torch.equal(run(linear, x, False), run(linear, x, None))


def test_data_where_data_was_that_is_gone() -> None:
    """Averages that are swapped in and out: a new storage may get the address of the one that was cast."""
    linear, x = Linear(16, 8, bias=False), torch.randn(4, 16)
    run(linear, x, True)
    address = linear.weight.untyped_storage()._cdata
    for _ in range(200):
        linear.weight.data = torch.randn(8, 16)
        if linear.weight.untyped_storage()._cdata == address:
            break
    assert torch.equal(run(linear, x, False), run(linear, x, None))


class Root(nn.Module):
    """``fully_shard`` gathers what a module's own call needs."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, first: bool | None) -> Tensor:
        return 1.0 * self.linear(x, is_first_microbatch=first)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_fully_sharded_weights(options: dict[str, bool], one_rank: DeviceMesh, casts: list[int]) -> None:
    linear, x = Linear(16, 8), torch.randn(4, 16)
    model = fully_shard(Root(linear), mesh=one_rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, **options)
    for step in range(3):
        outputs = []
        for micro_batch in range(3):
            with fp8_autocast(fp8_recipe="tensorwise"):
                outputs.append(model(x, step == micro_batch == 0))
            outputs[-1].square().sum().backward()
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
        assert len(casts) == step + 1  # once a step
        with torch.no_grad():
            weight, bias = (parameter.full_tensor() for parameter in (linear.weight, linear.bias))
            torch.testing.assert_close(outputs[0], F.linear(x, weight, bias), rtol=0.1, atol=0.2)
        optimizer.step()
        optimizer.zero_grad()
    assert linear.history is not None
    assert not linear.history.steps  # None where nothing listens to optimizers


def test_weights_made_for_inference() -> None:
    with torch.inference_mode():
        linear, x = Linear(32, 32), torch.randn(4, 32)
        with fp8_autocast(fp8_recipe="tensorwise"):
            assert torch.equal(linear(x, is_first_microbatch=True), linear(x))
            linear.weight.mul_(2)
            assert torch.equal(linear(x, is_first_microbatch=False), linear(x))
