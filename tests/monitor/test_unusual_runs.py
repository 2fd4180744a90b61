"""FP8Monitor in runs without FP8 layers, with teachers, with steps inside a batch, that are interrupted or trials."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import DelayedScaling, FP8Monitor, FP8Precision
from lightning_fp8.monitor.record import FIELDS, Record
from tests.monitor.test_monitor import Detached, Fault, Model, fit, monitor_of


class Convolution(Model):
    """No layer can run in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 4, 16), nn.Flatten())


def test_a_model_without_fp8_layers_trains(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 2)
    fit(monitor, model=Convolution(), steps=5)
    assert monitor.table() == "5 steps without FP8 layers under FP8Precision: only the loss is recorded"
    assert Record.load(tmp_path / "run.npz").num_steps == 5


class Distilled(Model):
    """Follows a copy of itself, which is only evaluated; ``off`` calls the copy outside FP8."""

    def __init__(self, off: bool = False) -> None:
        super().__init__()
        self.teacher = Model(1).net
        self.off = off

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for module in self.teacher.modules():
                if self.off and hasattr(module, "fp8"):
                    module.fp8 = False
            target = self.teacher(batch[0])
        return super().training_step([batch[0], target], batch_idx)


def test_a_teacher_without_gradients_is_no_alarm(tmp_path: Path) -> None:
    """It has no amaxes and is not sampled, but its record shows that it ran."""
    monitor = monitor_of(tmp_path, 4)
    fit(monitor, model=Distilled(), steps=24)
    assert monitor.record is not None
    assert any(name.startswith("teacher.") for name in monitor.record.names)
    assert not monitor.alarms


def test_a_teacher_that_runs_in_high_precision_is_an_alarm(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 4)
    fit(monitor, model=Distilled(off=True), steps=24)
    (alarm,) = monitor.alarms
    assert alarm.rule == "never ran"
    assert all(layer.startswith("teacher.") for layer in alarm.layers)


class Repeated(Model):
    """Steps its optimizer five times in each batch, as PPO does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(5):
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("every", [2, 10])
def test_each_step_inside_a_batch_is_followed(every: int, tmp_path: Path) -> None:
    """The figures of every step are those of a run of as many batches of the same data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 16, generator=generator)
    one_batch = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=48)
    records = []
    for model, interval in ((Model(), 5 if every == 2 else 10), (Repeated(), every)):
        monitor = FP8Monitor(interval, path=tmp_path / "run.npz")
        trainer = Trainer(
            max_steps=30, max_epochs=-1, logger=False, enable_checkpointing=False, accelerator="cpu", devices=1,
            enable_progress_bar=False, enable_model_summary=False, plugins=[FP8Precision()], callbacks=[monitor],
        )  # fmt: skip
        trainer.fit(model, one_batch)
        assert monitor.record is not None
        records.append(monitor.record)
    automatic, repeated = ([(each.first_step, each.last_step) for each in record.intervals] for record in records)
    assert automatic == repeated
    for one, other in zip(*(record.intervals for record in records)):
        for name in ("updates", "clipped_steps", "clipped_bits", "clipped_at", "head_room", "amax", "scale"):
            assert np.array_equal(one[name], other[name]), name
        assert (one["updates"] == one.last_step - one.first_step + 1).all()


def test_an_interrupted_run_reports_its_last_steps(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 7:
                raise KeyboardInterrupt

    monitor = monitor_of(tmp_path, 5)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(monitor, Interrupts())
    record = Record.load(tmp_path / "run.npz")
    assert [(each.first_step, each.last_step) for each in record.intervals] == [(1, 5), (6, 7)]
    assert (record.intervals[1]["updates"] == 2).all()


def test_a_trial_run_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for monitor in (FP8Monitor(), FP8Monitor(path=tmp_path / "asked.npz")):
        fit(monitor, fast_dev_run=2, steps=2)
    assert os.listdir(tmp_path) == ["asked.npz"]


def test_two_monitors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several FP8Monitor callbacks"):
        fit(monitor_of(tmp_path), FP8Monitor())


def test_a_run_in_bf16_after_one_in_fp8_has_none_of_its_alarms(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 4)
    fit(monitor, model=Distilled(off=True), steps=24)
    assert monitor.alarms
    fit(monitor, steps=5, plugins=[])
    assert monitor.alarms == []
    assert Record.load(tmp_path / "run-v1.npz").alarms == []


def test_a_record_that_is_damaged_inside_is_refused(tmp_path: Path) -> None:
    """Its end, which has the archive's table, is whole."""
    monitor = monitor_of(tmp_path, 2)
    fit(monitor, steps=4)
    whole = (tmp_path / "run.npz").read_bytes()
    refused = 0
    for start in range(100, len(whole) - 1000, len(whole) // 20):
        (tmp_path / "damaged.npz").write_bytes(whole[:start] + bytes(64) + whole[start + 64 :])
        try:
            Record.load(tmp_path / "damaged.npz")
        except ValueError as error:
            assert "not a record of FP8Monitor" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 10
    arrays = dict(np.load(tmp_path / "run.npz"))
    del arrays["steps"]
    np.savez(tmp_path / "lacking.npz", **arrays)
    with pytest.raises(ValueError, match="not a record of FP8Monitor"):
        Record.load(tmp_path / "lacking.npz")


def test_an_inf_in_one_step_leaves_figures_finite(tmp_path: Path) -> None:
    def infinite(x: Tensor, step: int) -> Tensor:
        return torch.cat([x[:-1], torch.full_like(x[-1:], torch.inf)])

    monitor = monitor_of(tmp_path, 10)
    fit(monitor, Fault("net.4", infinite, lambda step: step == 25), steps=30, model=Detached())
    record = Record.load(tmp_path / "run.npz")
    for interval in record.intervals:
        assert np.isfinite(interval["head_room"]).all()
        assert np.isfinite(interval["amax"]).all()
    assert [(each.rule, each.first_step) for each in monitor.alarms] == [("non-finite", 26)]


class Alternating(Model):
    """One layer runs in even steps only, and its input has a value that flushes the others."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for index, layer in enumerate(self.net):
            if index != 4:
                x = layer(x)
            elif self.global_step % 2 == 0:
                spread = torch.cat([x[:, :1].detach() * 0 + 1e6, x[:, 1:] * 1e-3], 1)
                x = x + 1e-9 * layer(spread)
        return (x - batch[1]).square().mean()


def test_a_layer_of_every_second_step_is_sampled(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 10)
    fit(monitor, model=Alternating(), recipe="tensorwise", steps=80)
    assert monitor.record is not None
    cast = monitor.record.names.index("net.4.input")
    casts = [each["casts"][cast] for each in monitor.record.intervals]
    assert 0 < sum(casts) < len(casts)
    assert ("flushes", "net.4.input") in [(each.rule, each.casts[0]) for each in monitor.alarms]


def test_a_history_of_one_amax_has_a_window(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 5)
    fit(monitor, recipe=DelayedScaling(amax_history_len=1), steps=10)
    assert monitor.record is not None
    for interval in monitor.record.intervals:
        assert (interval["window"] > 0).all()
        assert (interval["window"] <= interval["amax"]).all()
        assert interval["off_bits"].max() < 0.5


def test_what_happens_on_another_rank_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank has the figures of the first, but 9 bits clipped by one cast in one step, and a loss of NaN."""
    monitor = monitor_of(tmp_path, 150)
    clipping, n, steps = 9.0, 9, 150

    def gather(everyones: list[Tensor], own: Tensor) -> None:
        everyones[0].copy_(own)
        everyones[1].copy_(own)
        bits = everyones[1][n * len(FIELDS) :][: steps * n].view(steps, n)
        bits[120, 3] = clipping
        everyones[1][-2] = math.nan

    def begins(trainer: Trainer) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "all_gather", gather)

    report = monitor._report
    with monkeypatch.context() as patched:
        patched.setattr(monitor, "_report", lambda trainer: (begins(trainer), report(trainer), monkeypatch.undo()))
        fit(monitor, steps=steps)
    (alarm,) = monitor.alarms
    assert monitor.record is not None
    assert (alarm.rule, alarm.first_step, alarm.casts) == ("outlier step", 121, [monitor.record.names[3]])
    assert math.isnan(monitor.record.intervals[0].loss)
