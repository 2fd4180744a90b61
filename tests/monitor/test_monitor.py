"""FP8Monitor in a Trainer: planted faults, figures, files, and a training that it does not change."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8 import FP8Monitor, FP8Precision, Linear
from lightning_fp8.monitor.record import Record
from lightning_fp8.numerics.recipes import RECIPES, DelayedScaling
from lightning_fp8.numerics.scaled import Role
from tests.small import equal_weights
from tests.tiers import covering

FP8_LAYERS = ["net.2", "net.4", "net.6"]
WIDTH, ROWS = 64, 48


class Model(LightningModule):
    """Five linear layers, of which the three in the middle run in FP8, fit a function; data do not change."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = [16, WIDTH, WIDTH, WIDTH, WIDTH, 4]
        layers: list[nn.Module] = []
        for one, two in zip(sizes, sizes[1:]):
            layers += [nn.Linear(one, two), nn.SiLU()]
        self.net = nn.Sequential(*layers[:-1])
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def data(seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8 * ROWS, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=ROWS)


def fit(
    monitor: FP8Monitor | None,
    *callbacks: Callback,
    recipe: Any = "delayed",
    steps: int = 40,
    model: LightningModule | None = None,
    plugins: list[Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> LightningModule:
    model = model or Model(seed)
    own = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1} | options
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[FP8Precision(recipe=recipe)] if plugins is None else plugins,
        callbacks=[*([] if monitor is None else [monitor]), *callbacks],
        **own,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data(seed))
    return model


def monitor_of(folder: Path, every: int = 10, **options: Any) -> FP8Monitor:
    return FP8Monitor(every, path=folder / "run.npz", **options)


# --- A training that it does not change -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_equal_to_the_bit_with_and_without(recipe: str, tmp_path: Path) -> None:
    monitored, plain = fit(monitor_of(tmp_path, 2), recipe=recipe, steps=6), fit(None, recipe=recipe, steps=6)
    assert equal_weights(monitored, plain)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    model = fit(monitor_of(tmp_path, 2), steps=5)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.slots is not None:
            for slot in layer.slots.values():
                assert slot.sample is None
                assert slot.history.before_update is None


# --- Figures ----------------------------------------------------------------------------------------------------------


class Tensors(Callback):
    """Keeps the input, weight and gradient of a layer in each step, by hooks of torch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[dict[str, list[Tensor]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layer = pl_module.get_submodule(self.name)

        def forward(module: nn.Module, args: Any, output: Tensor) -> None:
            now = self.steps[-1]
            now["input"].append(args[0].detach().clone())
            now["weight"].append(module.weight.detach().clone())
            output.register_hook(lambda grad: now["grad_output"].append(grad.detach().clone()))

        layer.register_forward_hook(forward)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == len(self.steps):
            self.steps.append({"input": [], "weight": [], "grad_output": []})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_equal_those_of_the_same_tensors(accumulate: int, tmp_path: Path) -> None:
    """Amaxes and headroom of all steps, and what the sampled one flushed, in float64 and NumPy."""
    monitor, tensors = monitor_of(tmp_path, 4), Tensors("net.4")
    model = fit(monitor, tensors, steps=12, accumulate_grad_batches=accumulate)
    record = monitor.record
    assert record is not None
    of_intervals = np.array(model.losses).reshape(3, -1).mean(1)
    assert [each.loss for each in record.intervals] == pytest.approx(of_intervals.tolist(), rel=1e-6)
    assert [(each.first_step, each.last_step) for each in record.intervals] == [(1, 4), (5, 8), (9, 12)]
    assert len(tensors.steps) == 12
    largest = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}
    for role, fp8_max in largest.items():
        cast = record.names.index(f"net.4.{role}")
        amaxes = [max(float(x.abs().max()) for x in step[role]) for step in tensors.steps]
        scales = [0.0] + [fp8_max / max(amaxes[: index + 1]) for index in range(11)]  # the window holds all steps
        for interval in record.intervals:
            steps = range(interval.first_step - 1, interval.last_step)
            assert interval["updates"][cast] == 4
            assert interval["amax"][cast] == pytest.approx(max(amaxes[step] for step in steps))
            room = min(math.log2(fp8_max / (amaxes[step] * scales[step])) for step in steps if scales[step])
            assert interval["head_room"][cast] == pytest.approx(room, abs=1e-5)
            sampled = interval.first_step - 1 + {1: 1, 5: 2, 9: 1}[interval.first_step]
            read = tensors.steps[sampled][role]
            read = read[:1] if role == "weight" else read  # micro-batches share its cast
            x = torch.cat([each.double() for each in read])
            assert interval["elements"][cast] == x.numel()
            assert interval["casts"][cast] == len(read) == (1 if role == "weight" else accumulate)
            smallest = 2.0**-10 if role != "grad_output" else 2.0**-17  # half of the smallest code, which rounds to 0
            flushed = int(((x != 0) & ((x * scales[sampled]).abs() <= smallest)).sum())
            assert interval["flushed"][cast] == flushed
            rounded = {"input": 464.0, "weight": 464.0, "grad_output": 61440.0}[role]
            assert interval["clipped"][cast] == int(((x * scales[sampled]).abs() > rounded).sum())
            assert interval["signal"][cast] == pytest.approx(float(x.square().sum()), rel=1e-6)
            assert 20 < interval.decibels[cast] < 35
    assert [name.rpartition(".")[0] for name in record.names[::3]] == FP8_LAYERS


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_sampled(recipe: str, tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 5)
    fit(monitor, recipe=recipe, steps=15)
    record = Record.load(tmp_path / "run.npz")
    assert record.recipe == recipe
    assert len(record.names) == 9
    assert record.num_steps == 15
    assert sum(bool(each["casts"].any()) for each in record.intervals) == 3
    for interval in record.intervals:
        assert (interval["casts"] == 1).all()
        assert (interval["elements"] >= ROWS * WIDTH).all()
        assert (interval["updates"] == (5 if recipe == "delayed" else 0)).all()
        assert (interval.decibels > LEAST[recipe]).all()
    assert not np.isnan(record.losses).any()  # the first sample tried what others would lose
    assert record.exponents.sum(1).tolist() == record.intervals[0]["elements"].tolist()
    assert not monitor.alarms


LEAST = {"delayed": 23, "tensorwise": 23, "rowwise": 23, "blockwise": 28, "mxfp8": 28}
"""Decibels; E4M3 alone, or E5M2 for gradients."""


def test_scalars_go_to_the_loggers(tmp_path: Path) -> None:
    fit(monitor_of(tmp_path, 4), steps=8, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    with open(next(tmp_path.rglob("metrics.csv")), newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["fp8/alarms"]]
    assert [row["step"] for row in rows] == ["3", "7"]
    assert {name for name in rows[0] if name.startswith("fp8/")} == {
        "fp8/alarms", "fp8/clipped_bits_max", "fp8/clipped_casts", "fp8/flushed_max", "fp8/head_room_min",
    }  # fmt: skip
    fit(FP8Monitor(4, per_layer=True), steps=8, logger=CSVLogger(tmp_path / "layers"), log_every_n_steps=1)
    found = next((tmp_path / "layers").rglob("metrics.csv")).read_text()
    assert "fp8/flushed/net.4.input" in found


def test_the_file_is_beside_the_logs_and_replaces_nothing(tmp_path: Path) -> None:
    for name in ("fp8_monitor.npz", "fp8_monitor-v1.npz"):
        monitor = FP8Monitor(2)
        fit(monitor, steps=2, default_root_dir=tmp_path)
        assert monitor.saved_to == tmp_path / name
    monitor = FP8Monitor(2)
    logger = CSVLogger(tmp_path, name="runs")
    fit(monitor, steps=2, logger=logger)
    assert monitor.saved_to == Path(logger.log_dir) / "fp8_monitor.npz"
    record = Record.load(monitor.saved_to)
    assert [row["precision"] for row in record.layers] == ["BF16", "FP8", "FP8", "FP8", "BF16"]
    assert {"torch", "lightning", "device"} <= record.environment.keys()


def test_a_run_without_fp8_records_its_loss(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 4)
    fit(monitor, steps=10, plugins=[], precision="bf16-true")
    record = Record.load(tmp_path / "run.npz")
    assert record.recipe == "bf16-true"
    assert record.names == []
    assert [(each.first_step, each.last_step) for each in record.intervals] == [(1, 4), (5, 8), (9, 10)]
    assert all(0 < each.loss < 10 for each in record.intervals)
    assert monitor.table() == "10 steps without FP8 layers under FP8Precision: only the loss is recorded"


def test_a_run_that_fails_keeps_its_record(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 7:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(monitor_of(tmp_path, 3), Fails())
    assert Record.load(tmp_path / "run.npz").num_steps == 7


def test_a_folder_is_no_file_of_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path='.*' is a folder; name a file in it, for example .*fp8_monitor.npz"):
        FP8Monitor(path=tmp_path)
    monitor = FP8Monitor(path=str(tmp_path / "later"))
    (tmp_path / "later").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        fit(monitor, steps=2)
    assert [each.name for each in tmp_path.iterdir()] == ["later"]


def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monitor = FP8Monitor(2, path=tmp_path / "file" / "run.npz")
    model = Model()
    trainer = Trainer(
        max_steps=4, logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False,
        plugins=[FP8Precision()], callbacks=[monitor],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="FP8Monitor could not write"):
        trainer.fit(model, data())
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_steps": 0}, ValueError, "every_n_steps=0 must be from 1 to 10000"),
        ({"every_n_steps": 2.5}, TypeError, "every_n_steps=2.5 must be an integer"),
        ({"per_layer": 1}, TypeError, "per_layer=1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FP8Monitor(**arguments)


class Manual(Model):
    """Steps two optimizers in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        parameters = list(self.net.parameters())
        return [torch.optim.Adam(each, 1e-3) for each in (parameters[:6], parameters[6:])]


def test_manual_optimization_of_several_optimizers_is_watched(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 4)
    model = fit(monitor, model=Manual(), steps=8)
    assert monitor.record is not None
    assert [(each.first_step, each.last_step) for each in monitor.record.intervals] == [(1, 4), (5, 8)]
    for number, interval in enumerate(monitor.record.intervals):
        assert (interval["updates"] == 2).all()  # of two batches, in each of which an optimizer steps the layer
        assert (interval["casts"] == 2).all()  # of one batch, with two passes
        assert interval.loss == pytest.approx(np.mean(model.losses[4 * number + 1 : 4 * number + 4 : 2]), rel=1e-6)


def test_one_step_is_an_interval(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 1)
    fit(monitor, steps=3)
    assert monitor.record is not None
    assert [(each.first_step, each.last_step, each["casts"].sum()) for each in monitor.record.intervals] == [
        (1, 1, 9), (2, 2, 9), (3, 3, 9),
    ]  # fmt: skip


def test_a_monitor_watches_one_run_after_another(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 3)
    for name in ("run.npz", "run-v1.npz"):
        fit(monitor, steps=4)
        assert monitor.saved_to == tmp_path / name
        assert Record.load(tmp_path / name).num_steps == 4


def test_validation_between_steps_is_not_counted(tmp_path: Path) -> None:
    class Validated(Model):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.net(batch[0])

    counts = []
    for index, options in enumerate(({}, {"val_check_interval": 1, "limit_val_batches": 2})):
        monitor = monitor_of(tmp_path / str(index), 3)
        model = Validated()
        trainer = Trainer(
            max_steps=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, plugins=[FP8Precision()], callbacks=[monitor],
            num_sanity_val_steps=0, **options,
        )  # fmt: skip
        trainer.fit(model, data(), data())
        assert monitor.record is not None
        counts.append(np.stack([each.values for each in monitor.record.intervals]))
    np.testing.assert_array_equal(*counts)


# --- Planted faults ---------------------------------------------------------------------------------------------------


class Fault(Callback):
    """Changes what a layer reads, and nothing behind it, in the steps that ``when`` says."""

    def __init__(self, layer: str, change: Any, when: Any = lambda step: True) -> None:
        self.layer, self.change, self.when = layer, change, when

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def before(module: nn.Module, args: Any) -> Any:
            return (self.change(args[0], trainer.global_step),) if self.when(trainer.global_step) else None

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return torch.tanh(output)  # no more than 1, whatever came in

        pl_module.get_submodule(self.layer).register_forward_pre_hook(before)
        pl_module.get_submodule(self.layer).register_forward_hook(after)


def spreads(x: Tensor, step: int) -> Tensor:
    """One row that is far above all others."""
    return torch.cat([x[:-1], torch.full_like(x[-1:], 3e5)])


@pytest.fixture
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fp8.monitor.callback.WARM_UP", 20)


@pytest.mark.usefixtures("_short_warm_up")
def test_a_layer_that_saturates_is_found(tmp_path: Path) -> None:
    """Every second step is four times as large, and the scale follows the step before."""
    monitor = monitor_of(tmp_path, 20)
    recipe = DelayedScaling(amax_compute_algo="most_recent")
    fit(monitor, Fault("net.4", lambda x, step: x * 4, lambda step: step % 2), steps=80, recipe=recipe)
    assert {(alarm.kind, alarm.rule) for alarm in monitor.alarms} == {("layer", "clips")}
    assert monitor.alarms[0].casts[0] == "net.4.input"
    assert monitor.skip()[0] == "net.4"


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_layer_that_underflows_is_found(recipe: str, tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 10)
    fit(monitor, Fault("net.4", spreads), steps=40, recipe=recipe)
    (alarm,) = monitor.alarms
    assert (alarm.rule, alarm.layers, alarm.casts[0]) == ("flushes", ["net.4"], "net.4.input")
    assert monitor.skip() == ("net.4",)
    assert "skip=('net.4'" in monitor.table().replace("\n", " ")


@pytest.mark.usefixtures("_short_warm_up")
def test_an_outlier_step_is_found_between_samples(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 50)
    fit(monitor, Fault("net.4", lambda x, step: x * 100, lambda step: step == 37), steps=50)
    (alarm,) = monitor.alarms
    assert (alarm.kind, alarm.rule, alarm.first_step, alarm.last_step) == ("event", "outlier step", 38, 38)
    assert alarm.casts[0] == "net.4.input"
    assert monitor.skip() == ()


@pytest.mark.usefixtures("_short_warm_up")
def test_a_frozen_scale_is_found(tmp_path: Path) -> None:
    class Freeze(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            pl_module.net[4].slots[Role.INPUT].scale.fill_(3.0)

    monitor = monitor_of(tmp_path, 20)
    fit(monitor, Freeze(), steps=80)
    (alarm,) = monitor.alarms
    assert (alarm.rule, alarm.casts) == ("standing scale", ["net.4.input"])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_that_follow_are_not_off(algorithm: Any, tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 5)
    fit(monitor, steps=15, recipe=DelayedScaling(amax_compute_algo=algorithm, amax_history_len=32, margin=1))
    assert monitor.record is not None
    for interval in monitor.record.intervals:
        assert interval["off_bits"].max() < 0.5


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_layer_that_never_ran_is_found(recipe: str, tmp_path: Path) -> None:
    class Unused(Model):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x = batch[0]
            for index, layer in enumerate(self.net):
                x = x if index == 4 else layer(x)
            return (x - batch[1]).square().mean()

    monitor = monitor_of(tmp_path, 10)
    fit(monitor, steps=50, model=Unused(), recipe=recipe)
    (alarm,) = monitor.alarms
    assert (alarm.rule, alarm.layers, alarm.skip) == ("never ran", ["net.4"], ["net.4"])


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_a_nan_is_found(recipe: str, tmp_path: Path) -> None:
    def poisoned(x: Tensor, step: int) -> Tensor:
        return torch.cat([x[:-1], torch.full_like(x[-1:], torch.nan)])

    monitor = monitor_of(tmp_path, 10)
    fit(monitor, Fault("net.4", poisoned, lambda step: step == 23), steps=30, recipe=recipe, model=Detached())
    alarms = [each for each in monitor.alarms if each.rule == "non-finite"]
    assert alarms[0].first_step == 24  # a sampled step
    assert "net.4.input" in alarms[0].casts


class Detached(Model):
    """Skips a step whose gradients are not finite, as GradScaler does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad.nan_to_num_(0.0)


@pytest.mark.parametrize(
    ("recipe", "seed"),
    covering([(recipe, seed) for recipe in RECIPES for seed in range(3)], lambda row: {row} & {("delayed", 0)}),
)
def test_a_healthy_run_of_300_steps_has_no_alarm(recipe: str, seed: int, tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, 50)
    fit(monitor, recipe=recipe, steps=300, seed=seed)
    assert monitor.alarms == []
    assert "\n" not in monitor.table()
    assert monitor.table().startswith("FP8: 300 steps, 9 quantized tensors, 0 alarms, ")


def test_a_shorter_history_is_followed(tmp_path: Path) -> None:
    """The least headroom is what NumPy makes of the amaxes of a window of two steps."""
    monitor, tensors = monitor_of(tmp_path, 20), Tensors("net.4")
    fit(monitor, tensors, steps=20, recipe=DelayedScaling(amax_history_len=2, margin=1))
    amaxes = np.array([float(step["grad_output"][0].abs().max()) for step in tensors.steps])
    scales = 57344 / 2 / np.maximum(amaxes[1:-1], amaxes[:-2])
    assert monitor.record is not None
    cast = monitor.record.names.index("net.4.grad_output")
    room = min(*np.log2(57344 / (amaxes[2:] * scales)), np.log2(57344 / (amaxes[1] * 57344 / 2 / amaxes[0])))
    assert monitor.record.intervals[0]["head_room"][cast] == pytest.approx(room, abs=1e-5)
