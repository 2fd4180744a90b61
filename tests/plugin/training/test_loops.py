"""Activation checkpointing, accumulation, copies, averages, compiled blocks and manual optimization in FP8."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_fp8
from lightning_fp8 import DelayedScaling, FP8Precision
from lightning_fp8.numerics.recipes import RECIPES
from tests.plugin.training.conftest import Gemms
from tests.plugin.training.models import (
    Blocks,
    Regression,
    assert_falls,
    assert_same_bits,
    dataset,
    differentiable_collate,
    fit,
    fp8_modules,
    history_of,
    loader,
    parameters,
)
from tests.tiers import thorough

# Activation checkpointing, accumulation, copies, averages


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_activation_checkpointing_changes_no_bit(reentrant: bool, recipe: str, gemms: Gemms) -> None:
    plain = Regression(Blocks())
    recomputed = Regression(Blocks(checkpointing=reentrant))
    recomputed.load_state_dict(plain.state_dict())
    plugins, counts = [], []
    for module in (plain, recomputed):
        gemms.clear()
        # The reentrant kind needs an input with a gradient, else it trains nothing.
        data = DataLoader(dataset(), batch_size=32, collate_fn=differentiable_collate)
        plugins.append(fit(module, data, steps=12, plugin=FP8Precision(recipe, first_last_layers_bf16=False)))
        counts.append(sum(gemms.values()))
    assert len(fp8_modules(recomputed)) == 6
    assert counts == [12 * 3 * 6, 12 * 4 * 6]  # the forward runs twice
    assert recomputed.losses == plain.losses
    assert_same_bits(parameters(recomputed), parameters(plain))
    histories = [history_of(plugin) for plugin in plugins]
    assert torch.equal(histories[0].amax_history, histories[1].amax_history)
    assert torch.equal(histories[0].scale, histories[1].scale)
    assert_falls(recomputed.losses)


@thorough
@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=thorough), True])
def test_checkpointing_of_compiled_blocks_recomputes_in_fp8(reentrant: bool) -> None:
    torch._dynamo.reset()
    plain = Regression(Blocks())
    recomputed = Regression(Blocks(checkpointing=reentrant))
    recomputed.load_state_dict(plain.state_dict())
    for block in recomputed.model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    data = DataLoader(dataset(), batch_size=32, collate_fn=differentiable_collate)
    plugins = [fit(module, data, steps=5) for module in (plain, recomputed)]
    assert len(fp8_modules(recomputed)) == 2
    assert recomputed.losses == plain.losses
    assert_same_bits(parameters(recomputed), parameters(plain))
    assert torch.equal(history_of(plugins[1]).amax_history, history_of(plugins[0]).amax_history)
    assert (history_of(plugins[1]).amax_history[-5:] > 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulation_over_micro_batches_equals_one_big_batch(recipe: str, gemms: Gemms) -> None:
    start = Blocks()
    steps, trained, plugins = 3, [], []
    for batch_size, accumulate in ((32, 1), (8, 4)):
        module = Regression(copy.deepcopy(start), lr=0.1, optimizer=torch.optim.SGD)
        plugin = FP8Precision(
            DelayedScaling(amax_history_len=4) if recipe == "delayed" else recipe,
            weights_dtype=torch.float32,
            first_last_layers_bf16=False,
        )
        gemms.clear()
        fit(module, loader(32, batch_size), steps, plugin, accumulate_grad_batches=accumulate)
        assert sum(gemms.values()) == steps * accumulate * (6 * 3 - 1)  # the data needs no gradient
        trained.append(parameters(module.model))
        plugins.append(plugin)
    moved = {name: trained[0][name] - value for name, value in parameters(start).items()}
    for name, delta in moved.items():
        error = (trained[1][name] - trained[0][name]).norm() / delta.norm()
        assert delta.norm() > 0
        # Both round: gradients in E5M2 by at most 2^-3, in E4M3 by 2^-4.
        assert error < 2 * (2**-3 if recipe in ("delayed", "tensorwise") else 2**-4), f"{name}: {error:.3f}"

    if recipe == "delayed":
        big, accumulated = (history_of(plugin) for plugin in plugins)
        assert big.updates == accumulated.updates == steps
        assert big.amax_history.shape == (4, 18)
        assert (big.amax_history[0] == 0).all()
        # The data is no result of FP8: its amax is the maximum over the micro-batches, to the bit.
        row = big.names.index("model.blocks.0.fc1.input")
        assert accumulated.amax_history[1:, row].tolist() == [dataset().tensors[0].abs().amax().item()] * steps
        first_weight = big.names.index("model.blocks.0.fc1.weight")
        assert torch.equal(accumulated.amax_history[1, first_weight], start.blocks[0].fc1.weight.detach().abs().amax())
        torch.testing.assert_close(accumulated.amax_history, big.amax_history, rtol=0.25, atol=0)
        torch.testing.assert_close(accumulated.scale, big.scale, rtol=0.25, atol=0)
        assert (accumulated.amax == 0).all()


def test_deepcopy_of_a_converted_model_is_independent() -> None:
    module = Regression(Blocks())
    plugin = fit(module, steps=5)
    twin = copy.deepcopy(module)
    history = history_of(plugin)
    linears = [m for m in twin.modules() if isinstance(m, lightning_fp8.Linear)]
    copied = {id(slot.history) for linear in linears for slot in linear.slots.values()}
    assert len(copied) == 1
    assert id(history) not in copied

    before, scale = parameters(module), history.scale.clone()
    losses_so_far = len(twin.losses)
    twin_plugin = fit(twin, steps=20)
    assert history_of(twin_plugin) is not history
    amax_history = history_of(twin_plugin).amax_history
    assert (amax_history[:-20] == 0).all(), "a copy starts without amaxes"
    assert (amax_history[-20:-1] > 0).any()
    assert_same_bits(parameters(module), before)
    assert torch.equal(history.scale, scale)
    assert (history.amax == 0).all()
    assert len(fp8_modules(twin)) == 2
    assert_falls([*module.losses, *twin.losses[losses_so_far:]])


class RecordWeights(Callback):
    """Every parameter after every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights.append(parameters(pl_module))


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMA callback")
def test_exponential_average_of_lightning(gemms: Gemms) -> None:
    module, record, decay = Regression(Blocks()), RecordWeights(), 0.5
    ema = lightning_callbacks.EMAWeightAveraging(decay=decay)
    plugin = FP8Precision(weights_dtype=torch.float32)
    fit(module, steps=20, plugin=plugin, callbacks=(record, ema), validation=loader(), check_val_every_n_epoch=5)
    average = record.weights[0]
    for weights in record.weights[1:]:
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
    assert len(record.weights) == 20
    for name, value in parameters(module).items():
        torch.testing.assert_close(value, average[name], rtol=1e-4, atol=1e-6)
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == len(fp8_modules(module)) == 2
    assert sum(gemms.values()) == 20 * 3 * 2 + len(module.validated) * 2
    assert len(module.validated) == 4
    assert_falls(module.losses)


def test_stochastic_weight_averaging_of_lightning(gemms: Gemms) -> None:
    class RecordEpochs(Callback):
        """The weights at the start of every epoch."""

        def __init__(self) -> None:
            self.weights: list[dict[str, Tensor]] = []

        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.weights.append(parameters(pl_module))

    module, record = Regression(Blocks()), RecordEpochs()
    swa = StochasticWeightAveraging(swa_lrs=3e-3, swa_epoch_start=8, annealing_epochs=1)
    plugin = FP8Precision(weights_dtype=torch.float32)
    fit(module, plugin=plugin, callbacks=(record, swa), max_steps=-1, max_epochs=12)
    swept = record.weights[swa.swa_start :]
    assert swa.n_averaged is not None
    assert int(swa.n_averaged) == len(swept) == 5
    for name, value in parameters(module).items():
        expected = torch.stack([weights[name] for weights in swept]).mean(0)
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    assert plugin.summary is not None
    assert plugin.summary.num_fp8 == len(fp8_modules(module)) == 2
    assert sum(gemms.values()) == len(module.losses) * 3 * 2
    assert_falls(module.losses, to=0.9)


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("aot_eager", "delayed"),
        pytest.param("aot_eager", "blockwise", marks=thorough),
        pytest.param("inductor", "delayed", marks=thorough),
    ],
)
def test_compiled_block_trains_as_the_eager_one(backend: str, recipe: str) -> None:
    torch._dynamo.reset()
    eager = Regression(Blocks(), lr=0.05, optimizer=torch.optim.SGD)
    compiled = copy.deepcopy(eager)
    compiled.model.blocks[1].compile(fullgraph=True, backend=backend)
    plugins = [FP8Precision(recipe, weights_dtype=torch.float32) for _ in range(2)]
    for module, plugin in zip((eager, compiled), plugins):
        fit(module, steps=5, plugin=plugin)
    assert fp8_modules(compiled) == ["model.blocks.1.fc1", "model.blocks.1.fc2"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for name, value in parameters(compiled).items():
        torch.testing.assert_close(value, parameters(eager)[name], rtol=1e-5, atol=1e-6)
    if backend == "aot_eager":
        assert compiled.losses == eager.losses
    histories = [history_of(plugin) for plugin in plugins]
    torch.testing.assert_close(histories[1].amax_history, histories[0].amax_history, rtol=1e-5, atol=0)
    assert histories[1].updates == (5 if recipe == "delayed" else 0)
    if recipe == "delayed":
        assert (histories[1].amax_history[-5:] > 0).all()
    assert_falls(compiled.losses, to=0.95)


# Manual optimization


class Manual(Regression):
    """Steps its optimizers by hand: one for everything, or one for each half of the parameters."""

    def __init__(self, model: nn.Module, optimizers: int) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self.number = optimizers

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        groups = [list(self.parameters())[index :: self.number] for index in range(self.number)]
        return [torch.optim.Adam(group, lr=3e-3) for group in groups]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers(use_pl_optimizer=True)
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization_equals_automatic(optimizers: int, gemms: Gemms) -> None:
    automatic = Regression(Blocks())
    manual = Manual(copy.deepcopy(automatic.model), optimizers)
    plugins = [fit(automatic, steps=20), fit(manual, steps=20 * optimizers)]  # Lightning counts every optimizer's step
    assert_same_bits(parameters(manual), parameters(automatic))
    assert manual.losses == automatic.losses
    histories = [history_of(plugin) for plugin in plugins]
    assert torch.equal(histories[1].amax_history, histories[0].amax_history)
    assert (histories[1].amax_history[-20:] > 0).all()
    assert sum(gemms.values()) == 2 * 20 * 3 * 2
    assert len(fp8_modules(manual)) == 2
    assert_falls(manual.losses)


def test_two_models_of_a_manual_module_step_by_turns() -> None:
    class Turns(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = Blocks(), Blocks(2)
            self.losses: dict[str, list[float]] = {"a": [], "b": []}

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(part.parameters(), lr=3e-3) for part in (self.a, self.b)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for name, optimizer in zip("ab", self.optimizers()):
                loss = F.mse_loss(getattr(self, name)(x).float(), y.float())
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.losses[name].append(loss.item())

    module = Turns()
    plugin = FP8Precision(DelayedScaling(amax_history_len=30), first_last_layers_bf16=False)
    fit(module, steps=60, plugin=plugin)
    history = history_of(plugin)
    assert history.updates == 60
    assert len(fp8_modules(module)) == 10
    # A turn of the other part leaves window and scale of this one alone: 30 turns fill the window.
    assert (history.amax_history[1:] > 0).all()
    for part in "ab":
        assert_falls(module.losses[part])
