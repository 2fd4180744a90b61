"""Training under Fabric: FP8 GEMMs really run, scales move with optimizer steps, checkpoints restore them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fp8 import DelayedScaling, FP8FabricPrecision
from tests.plugin.training.conftest import Gemms
from tests.plugin.training.models import (
    Blocks,
    assert_falls,
    assert_same_bits,
    dataset,
    fp8_modules,
    history_of,
    parameters,
)

# Fabric


def fabric_with(plugin: FP8FabricPrecision) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


def fabric_steps(fabric: Fabric, model: Any, optimizer: Any, steps: int, x: Tensor, y: Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("weights_dtype", "compute_dtype"),
    [(None, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, None)],
)
def test_fabric(weights_dtype: torch.dtype | None, compute_dtype: torch.dtype | None, gemms: Gemms) -> None:
    plugin = FP8FabricPrecision(
        DelayedScaling(amax_history_len=31), weights_dtype=weights_dtype, compute_dtype=compute_dtype
    )
    fabric, model = fabric_with(plugin), Blocks()
    computed: list[torch.dtype] = []
    model.blocks[1].fc1.register_forward_hook(lambda module, args, output: computed.append(output.dtype))
    before = list(model.parameters())
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    assert all(after is parameter for after, parameter in zip(model.parameters(), before, strict=True))
    history = history_of(plugin)
    x, y = dataset().tensors
    losses = []
    for step in range(1, 31):
        scale = history.scale.clone()
        losses += fabric_steps(fabric, wrapped, optimizer, 1, x, y)
        assert history.updates == step
        assert not torch.equal(history.scale, scale)
        assert (history.amax == 0).all()
    assert fp8_modules(model) == ["blocks.1.fc1", "blocks.1.fc2"]
    assert sum(gemms.values()) == 30 * 3 * 2
    assert {parameter.dtype for parameter in model.parameters()} == {weights_dtype or torch.float32}
    assert set(computed) == {compute_dtype or weights_dtype or torch.bfloat16}
    # The window holds the amaxes of all 30 steps, and their largest makes the scale: by E4M3's and E5M2's own largest.
    largest = torch.tensor([57344.0 if name.endswith("grad_output") else 448.0 for name in history.names])
    torch.testing.assert_close(history.scale, largest / history.amax_history.amax(0))
    assert_falls(losses)


def test_fabric_checkpoint_restores_scales(tmp_path: Path) -> None:
    x, y = dataset().tensors

    def start() -> tuple[Fabric, Any, Any, FP8FabricPrecision]:
        torch.manual_seed(5)
        plugin, model = FP8FabricPrecision(), Blocks()
        fabric = fabric_with(plugin)
        return fabric, *fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3)), plugin

    fabric, model, optimizer, plugin = start()
    fabric_steps(fabric, model, optimizer, 6, x, y)
    fabric.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer, "fp8": plugin})
    saved = copy.deepcopy(plugin.state_dict())
    expected = fabric_steps(fabric, model, optimizer, 6, x, y)

    fabric, other, optimizer, restored = start()
    assert not history_of(restored).scale.any()
    fabric.load(tmp_path / "x.ckpt", {"model": other, "optimizer": optimizer, "fp8": restored})
    assert torch.equal(history_of(restored).scale, saved["model"]["scale"])
    assert torch.equal(history_of(restored).amax_history, saved["model"]["amax_history"])
    assert history_of(restored).updates == 6
    assert fabric_steps(fabric, other, optimizer, 6, x, y) == expected
    assert_same_bits(parameters(other), parameters(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_under_fabric_recomputes_in_fp8(reentrant: bool, gemms: Gemms) -> None:
    start, results = Blocks(), []
    x, y = dataset().tensors
    for checkpointing in (None, reentrant):
        model = copy.deepcopy(start)
        model.checkpointing = checkpointing
        plugin = FP8FabricPrecision()
        fabric = fabric_with(plugin)
        wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))
        gemms.clear()
        losses = fabric_steps(fabric, wrapped, optimizer, 8, x.clone().requires_grad_(), y)
        assert sum(gemms.values()) == 8 * 2 * (3 if checkpointing is None else 4)
        results.append((losses, parameters(model), history_of(plugin).amax_history))
    (losses, weights, amax_history), (other_losses, other_weights, other_window) = results
    assert other_losses == losses
    assert_same_bits(other_weights, weights)
    assert torch.equal(other_window, amax_history)


def test_fabric_with_a_closure_updates_scales_after_its_backward() -> None:
    plugin = FP8FabricPrecision()
    fabric, model = fabric_with(plugin), Blocks()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = dataset().tensors

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x).float(), y)
        fabric.backward(loss)
        return loss

    losses = [optimizer.step(closure=closure).item() for _ in range(10)]
    history = history_of(plugin)
    assert history.updates == 10
    assert (history.amax_history[-10:] > 0).all()
    assert_falls(losses, to=0.95)


def test_fabric_looks_after_every_model_it_sets_up() -> None:
    plugin = FP8FabricPrecision()
    fabric = fabric_with(plugin)
    x, y = dataset().tensors
    models = [fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3)) for model in (Blocks(), Blocks(4))]
    assert [len(history.names) for history in plugin.histories.values()] == [2 * 3, 4 * 3]
    for model, optimizer in models:
        assert_falls(fabric_steps(fabric, model, optimizer, 20, x, y))
    first, second = plugin.histories.values()
    # The second model's steps left the first alone.
    assert (first.amax_history[-20:] > 0).all()
    assert not first.amax_history[:-20].any()
    assert (second.amax_history[-20:] > 0).all()
    assert set(plugin.state_dict()) == {"recipe", "model", "model_1"}


def test_fabric_without_gradients_observes_nothing() -> None:
    plugin = FP8FabricPrecision()
    fabric = fabric_with(plugin)
    model: Callable[[Tensor], Tensor] = fabric.setup(Blocks())
    with torch.no_grad():
        model(dataset().tensors[0])
    assert not history_of(plugin).amax.any()
    model(dataset().tensors[0])
    input_weight_gradient = [True, True, False]  # no backward ran
    assert (history_of(plugin).amax > 0).tolist() == 2 * input_weight_gradient
