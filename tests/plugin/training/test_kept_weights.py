"""Weights that are cast once per optimizer step: while the Trainer accumulates gradients, or where somebody asks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from cuda_kernels.host.launch import executing
from lightning_fp8 import FP8Monitor, FP8Precision
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.ops import cast
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.plugin.kept_weights import KeptWeights
from lightning_fp8.proofs.comparing import kernels_of
from tests.op_sides import note_calls
from tests.small import Regression, equal_weights, fp8_trainer, regression_data
from tests.tiers import thorough

LAYERS = 2  # of Regression's four run in FP8


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The address of each weight that was cast; weights alone are square here."""
    made: list[int] = []

    def note(x: Tensor, *others: Any) -> None:
        if x.shape[0] == x.shape[1]:
            made.append(x.data_ptr())

    note_calls(monkeypatch, quantize_op, note)
    return made


def fitted(
    kind: type[Regression] = Regression, recipe: str = "delayed", keep: bool | None = None, **options: Any
) -> tuple[Regression, dict[str, Any]]:
    """A module that has trained for 2 epochs of 4 batches, and its plugin's state."""
    torch.manual_seed(0)
    module = kind()
    trainer = fp8_trainer(recipe, fp8={"cache_fp8_weights": keep}, max_epochs=2, **options)
    trainer.fit(module, regression_data(), regression_data(rows=32, seed=1))
    assert isinstance(trainer.precision_plugin, FP8Precision)
    return module, trainer.precision_plugin.state_dict()["model"]


def assert_same(one: tuple[Regression, dict[str, Any]], other: tuple[Regression, dict[str, Any]]) -> None:
    assert one[0].losses == other[0].losses
    assert equal_weights(one[0], other[0])
    for key in ("scale", "amax_history", "seen", "counts"):
        assert torch.equal(one[1][key], other[1][key])


class Recomputed(Regression):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True) if self.training else self.net(x)


@pytest.mark.parametrize(
    ("recipe", "kind"), [("delayed", Regression), ("blockwise", Regression), ("delayed", Recomputed)]
)
def test_accumulation_casts_weights_once_a_step(recipe: str, kind: type[Regression], casts: list[int]) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    kept = fitted(kind, recipe, **options)
    assert len(casts) == LAYERS * 2  # steps
    casts.clear()
    anew = fitted(kind, recipe, keep=False, **options)
    assert len(casts) == LAYERS * 8 * (3 if kind is Recomputed else 2)  # forwards and backwards of every micro-batch
    assert_same(kept, anew)


class Frozen(Regression):
    """Trains a scale for each column that two frozen layers get, in place of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.scales = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scales)


@pytest.mark.parametrize("keep", [None, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_frozen_weights_are_cast_once(recipe: str, keep: bool | None, casts: list[int]) -> None:
    """And again in each epoch, before which callbacks may put others in place; unasked, or delayed, in each step."""
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    options["accumulate_grad_batches"] = 1 if keep else 2
    kept = fitted(Frozen, recipe, keep, **options)
    epochs, steps = 2, 8 if keep else 4
    assert len(casts) == LAYERS * (epochs if keep and recipe != "delayed" else steps)
    assert_same(kept, fitted(Frozen, recipe, keep=False, **options))


def test_a_monitor_samples_frozen_weights(tmp_path: Path) -> None:
    """In every step that it samples, not only in the one that casts them."""
    sampled = []
    for keep in (True, False):
        monitor = FP8Monitor(every_n_steps=2, path=tmp_path / f"{keep}.npz")
        options: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "callbacks": [monitor]}
        fitted(Frozen, "tensorwise", keep, **options)
        assert monitor.record is not None
        rows = [at for at, role in enumerate(monitor.record.roles) if role == "weight"]
        sampled.append(torch.tensor([interval.values[rows] for interval in monitor.record.intervals]))
    assert len(sampled[0]) == 4
    torch.testing.assert_close(*sampled, rtol=0, atol=0, equal_nan=True)


class Taught(Regression):
    """Learns from a frozen copy, which an average of the weights moves after each step, as in a mean teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self(batch[0]) - self.teacher(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx % 2:
            for average, own in zip(self.teacher.parameters(), self.net.parameters()):
                average.data.mul_(0.5).add_(own.data, alpha=0.5)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_teacher_whose_data_changes_after_a_step_is_cast_anew(recipe: str) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    assert_same(fitted(Taught, recipe, **options), fitted(Taught, recipe, keep=False, **options))


def test_validation_casts_weights_once_too(casts: list[int]) -> None:
    """It comes in the middle of a step here: what that has cast is cast again, and observed once."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "num_sanity_val_steps": 0, "val_check_interval": 2}
    kept = fitted(**options)
    assert len(casts) == LAYERS * (4 + 2 * 2)  # validations of 2 batches each; each of two steps goes on after one
    assert_same(kept, fitted(keep=False, **options))


@pytest.mark.parametrize("keep", [None, True])
def test_a_model_that_does_not_accumulate_keeps_nothing_unasked(keep: bool | None, casts: list[int]) -> None:
    kept = fitted(keep=keep, limit_val_batches=0)
    assert len(casts) == LAYERS * 8 * (1 if keep else 2)
    assert_same(kept, fitted(keep=False, limit_val_batches=0))
    assert all(module._weight_cache is None for _, module in fp8_modules(kept[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_both_copies_of_a_kept_weight_take_one_launch(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where the transposed copy is no view; without a scale yet, a launch before it finds the amax."""
    monkeypatch.setattr(cast, "gives_a_view", lambda *args: False)
    launched: list[list[str]] = []

    def note(x: Tensor, *others: Any) -> None:
        if x.shape[0] == x.shape[1]:
            launched.append([])
            with executing(lambda kernel, *args: launched[-1].append(kernel.name)):
                kernels_of(quantize_op)(x, *others)

    note_calls(monkeypatch, quantize_op, note)
    fitted(recipe=recipe, keep=True, limit_val_batches=0, num_sanity_val_steps=0)
    assert len(launched) == LAYERS * 8
    for (kernel,) in launched[-LAYERS:]:
        assert "rowwise=True, columnwise=True" in kernel


def test_a_schedule_of_accumulation(casts: list[int]) -> None:
    """The second epoch does not accumulate."""
    kept = fitted(callbacks=[GradientAccumulationScheduler({0: 4, 1: 1})], limit_val_batches=0)
    assert len(casts) == LAYERS * (1 + 4 * 2)
    schedule = GradientAccumulationScheduler({0: 4, 1: 1})
    assert_same(kept, fitted(keep=False, callbacks=[schedule], limit_val_batches=0))


@thorough
def test_compiled_code_keeps_none_and_is_not_compiled_anew() -> None:
    """A validation begins another period, which changes no guard."""
    torch._dynamo.reset()
    module = Regression()
    compiled_in_epoch: list[int] = []
    trainer = fp8_trainer(accumulate_grad_batches=4, val_check_interval=2, max_epochs=2, num_sanity_val_steps=0)

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_in_epoch.append(trainer.current_epoch)
        return graph

    module.net.compile(backend=backend)
    trainer.fit(module, regression_data(), regression_data(rows=32, seed=1))
    assert set(compiled_in_epoch) == {0}
    assert all(layer._weight_cache is None for _, layer in fp8_modules(module))  # type: ignore[attr-defined]


class Averaged(L.Callback):
    """Evaluates other weights, which it puts in place by ``data``: no version tells."""

    def swap(self, trainer: L.Trainer, module: L.LightningModule, factor: float) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(factor)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap(trainer, pl_module, 2.0)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap(trainer, pl_module, 0.5)


def test_averages_put_in_place_for_validation_are_seen() -> None:
    losses = []
    for keep in (None, False):
        torch.manual_seed(0)
        trainer = fp8_trainer(
            fp8={"cache_fp8_weights": keep}, callbacks=[Averaged()], accumulate_grad_batches=4, val_check_interval=2
        )
        trainer.fit(Regression(), regression_data(), regression_data(rows=32, seed=1))
        losses.append(trainer.callback_metrics["val_loss"])
    assert torch.equal(*losses)


def test_sharded_weights_are_kept_on_demand_only(one_rank: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=one_rank)
    for chosen, period in ((None, None), (True, 0), (False, None)):
        kept = KeptWeights(chosen)
        kept.micro_batch_begins(model, 4)
        assert kept.period == period


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(TypeError, match="cache_fp8_weights='auto' must be True or False"):
        FP8Precision(cache_fp8_weights="auto")  # type: ignore[arg-type]
