"""FP8Monitor: a callback that records the effects of FP8 on a run of a Trainer."""

from __future__ import annotations

import math
import os
import platform
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_fp8.arguments import naming_arguments, require_bool
from lightning_fp8.monitor.alarms import WARM_UP, Alarm, Alarms, skip_of
from lightning_fp8.monitor.casts import Casts, Sampler, StepRows, StepTrace, clipped_bits, off_bits, step_figures
from lightning_fp8.monitor.figure import log_figure
from lightning_fp8.monitor.record import INDEX, Array, Interval, Record, of_ranks
from lightning_fp8.monitor.table import table
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe
from lightning_fp8.ops.sample import COUNTS, largest_rounded
from lightning_fp8.plugin.precision import FP8Precision
from lightning_fp8.version import __version__

WHAT_IF_EVERY = 10
"""Every so many samples, also count the errors of other recipes."""

FILE = "fp8_monitor.npz"
"""The file of a record, if ``path`` names none."""

LONGEST_INTERVAL = 10_000
"""The maximum number of steps of an interval, since their amaxes and scales are held in memory."""

SECONDS_BETWEEN_WRITES = 60.0
"""The minimum time between two writes of the record during a run."""


class FP8Monitor(Callback):
    """Records the effects of FP8 on a run: ``Trainer(plugins=[FP8Precision()], callbacks=[FP8Monitor()])``.

    With delayed scaling, it records in every step how much each cast clips, without a pass over data. With all recipes,
    it counts the values that casts of linear layers flush to zero, clip and round, in one step of each interval and on
    about 2**18 values of each tensor. Each interval ends with a report: a warning for each new alarm, and up to five
    scalars for the Trainer's loggers (``fp8/alarms``, ``fp8/clipped_bits_max``, ``fp8/clipped_casts``,
    ``fp8/flushed_max``, ``fp8/head_room_min``). The record of the run is written to the folder of its logs, and
    ``lightning-fp8 report`` makes a page of it. Ranks run one collective per report. Attention is not included, because
    its blocks of 128 rows compute their own scales.

    With another precision plugin than ``FP8Precision``, only the loss is recorded, for comparison.

    Args:
        every_n_steps: the number of optimizer steps of an interval.
        per_layer: also log the figures of each cast.
        path: the file of the record. ``None`` is ``fp8_monitor.npz`` in the Trainer's ``log_dir``, or
            ``default_root_dir``, and no file with ``fast_dev_run``. An existing file is kept, and the new one gets a
            number. A folder is refused.

    Attributes:
        alarms: the alarms that were found.
        record: the record of the run; ``None`` before training.
        saved_to: the file of the record; ``None`` before training, and on ranks that do not write it.

    Raises:
        TypeError, ValueError: If ``every_n_steps`` is not an integer from 1 to 10,000, ``per_layer`` not a bool, or
            ``path`` not a path.
    """

    @naming_arguments
    def __init__(
        self, every_n_steps: int = 50, *, per_layer: bool = False, path: str | os.PathLike[str] | None = None
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int):
            raise TypeError(f"every_n_steps={every_n_steps!r} must be an integer from 1 to {LONGEST_INTERVAL}")
        if not 1 <= every_n_steps <= LONGEST_INTERVAL:
            raise ValueError(f"every_n_steps={every_n_steps} must be from 1 to {LONGEST_INTERVAL}")
        if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path).strip()):
            raise TypeError(f"path={path!r} must be a file, or None for one in the folder of the logs")
        require_bool("per_layer", per_layer)
        self.every_n_steps = every_n_steps
        self.per_layer = per_layer
        self.path = None if path is None else Path(path)
        self._refuse_folder()
        self.record: Record | None = None
        self.saved_to: Path | None = None
        self._alarms: Alarms | None = None
        self._recipe: Recipe | None = None
        self._trace: StepTrace | None = None
        self._sampler: Sampler | None = None

    def _refuse_folder(self) -> None:
        if self.path is not None and self.path.is_dir():
            raise ValueError(
                f"path={str(self.path)!r} is a folder; name a file in it, for example {self.path / FILE}, or leave "
                "path out to write to the folder of the logs"
            )

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms, in the order in which they were found."""
        return [] if self._alarms is None else self._alarms.found

    def skip(self) -> tuple[str, ...]:
        """The layers that the alarms recommend to keep in BF16: ``FP8Precision(skip=monitor.skip())``."""
        return skip_of(self.alarms)

    def table(self, width: int = 80) -> str:
        """A summary of the run in one line, followed by the alarms, in lines of at most ``width`` columns."""
        return "" if self.record is None else table(self.record, self.alarms, width)

    # --- The Trainer's hooks ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse several monitors, which would replace each other's samples, and a folder as ``path``."""
        if sum(isinstance(each, FP8Monitor) for each in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has several FP8Monitor callbacks; pass one")
        self._refuse_folder()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plugin = trainer.precision_plugin
        self._stop()
        folder = trainer.log_dir or trainer.default_root_dir  # log_dir is a collective
        self._alarms = None
        self._start = self._run_start = trainer.global_step
        self._samples = 0
        self._has_sampled = self._in_sample = False  # in this interval; at this step
        self._sampled_step = -1
        self._loss: Tensor | None = None
        self._losses = 0
        self._written = time.monotonic()
        self._recipe = recipe = plugin.recipe if isinstance(plugin, FP8Precision) else None
        self._casts = casts = Casts([], [], [], []) if recipe is None else Casts.of(pl_module)
        formats = [] if recipe is None else [recipe.cast(role).float8 for role in casts.roles]
        self.record = Record(
            casts.names,
            [role.value for role in casts.roles],
            trainer.precision if recipe is None else recipe.name,
            "" if recipe is None else str(recipe),
            environment=_environment(pl_module.device),
            formats=[each.name for each in formats],
        )
        self._fp8_max = np.array([each.max for each in formats])
        self._largest = np.array([largest_rounded(each) for each in formats])
        self._sampler = Sampler(casts.slots)
        if recipe is not None:
            self._alarms = Alarms(casts.names, casts.roles, recipe)
        if isinstance(recipe, DelayedScaling):
            self._trace = StepTrace(casts.slots, self.every_n_steps)
        is_trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        path = self.path or (None if is_trial else Path(folder) / FILE)
        self.saved_to = _unused(path) if path is not None and trainer.is_global_zero else None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._trace is not None:
            self._trace.row = trainer.global_step - self._start
        due = trainer.global_step - self._start >= _sampled_row(self._samples, self.every_n_steps)
        if self._sampler is not None and due and not self._has_sampled:
            self._has_sampled = self._in_sample = True
            self._sampled_step = trainer.global_step
            self._sampler.begin(what_if=self._samples % WHAT_IF_EVERY == 0)
            self._samples += 1

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._trace is not None and len(trainer.optimizers) == 1:  # a batch may step it repeatedly
            self._trace.row = trainer.global_step - self._start

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach().to(torch.float32 if loss.device.type == "mps" else torch.float64).reshape(())
            if pl_module.automatic_optimization:  # the loss was divided
                loss = loss * trainer.accumulate_grad_batches
            self._loss = loss if self._loss is None else self._loss + loss
            self._losses += 1
        if self._in_sample and self._sampler is not None and trainer.global_step > self._sampled_step:
            self._sampler.end()
            self._in_sample = False
        if trainer.global_step - self._start >= self.every_n_steps:
            self._report(trainer)
            if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
                self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.record is None:
            return
        if trainer.global_step > self._start:
            self._report(trainer)
        self._save(trainer)
        self._stop()
        if trainer.is_global_zero:
            log_figure(trainer.loggers, self.record, trainer.fit_loop.epoch_loop._batches_that_stepped)
        rank_zero_info(self.table())

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the steps of the current interval and save. With several ranks, it only saves: others may be gone."""
        if self._sampler is not None and (self._recipe is not None or self._losses):
            try:
                if trainer.world_size == 1 and trainer.global_step > self._start:
                    self._report(trainer)
            except RuntimeError as error:  # of the device, whose tensors cannot be read
                rank_zero_warn(f"FP8Monitor could not report the last steps: {error}")
            self._save(trainer)
        self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    # --- Reports ------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._trace is not None:
            self._trace.stop()
        if self._sampler is not None:
            self._sampler.end()
        self._trace = self._sampler = None
        self._casts = Casts([], [], [], [])  # keeps no model alive

    def _report(self, trainer: Trainer) -> None:
        assert self.record is not None
        values, bits, ran, loss = self._of_all_ranks(*self._figures(trainer.global_step - self._start), trainer)
        interval = Interval(self._start + 1, trainer.global_step, loss, values)
        self._start = trainer.global_step
        self._loss, self._losses = None, 0
        self._has_sampled = False
        self.record.add(interval)
        if self._alarms is None:
            return
        warm_up, sampled_step = self._run_start + WARM_UP, self._sampled_step + 1
        for alarm in self._alarms.see(interval, bits, warm_up, ran, sampled_step):
            rank_zero_warn(str(alarm))
        self._log(trainer, interval)

    def _figures(self, steps: int) -> tuple[Array, Array]:
        """The figures of this rank's casts ``[n, len(FIELDS)]``, and the bits that each step clipped ``[steps, n]``."""
        assert self.record is not None
        assert self._sampler is not None
        counts, losses, exponents = self._sampler.read()
        rows = StepRows.zeros(0, len(counts)) if self._trace is None else self._trace.read(steps)
        bits = clipped_bits(rows, self._largest)
        values = step_figures(rows, bits, self._fp8_max, self._start + 1)
        if self._trace is not None and isinstance(self._recipe, DelayedScaling):
            window = self._trace.followed_amax(self._recipe, rows)
            values[:, INDEX["window"]] = window
            values[:, INDEX["off_bits"]] = off_bits(rows, window, self._fp8_max, self._recipe)
        for name, column in zip(COUNTS, counts.T):
            values[:, INDEX[name]] = column
        self.record.add_losses(losses)
        self.record.exponents += exponents
        return values, bits

    def _of_all_ranks(
        self, values: Array, bits: Array, trainer: Trainer
    ) -> tuple[Array, Array, NDArray[np.bool_], float]:
        """The figures, clipped bits, casts that ran unobserved, and the mean loss of all ranks, by one collective."""
        ran = self._casts.ran_unobserved()
        losses = np.array([0.0 if self._loss is None else float(self._loss), float(self._losses)])
        own: list[Array] = [values, bits, ran.astype(np.float64), losses]
        ranks = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            flat = torch.from_numpy(np.concatenate([each.ravel() for each in own])).to(trainer.strategy.root_device)
            gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, flat)
            ends = np.cumsum([each.size for each in own])[:-1]
            ranks = [
                [part.reshape(each.shape) for part, each in zip(np.split(of_rank.cpu().numpy(), ends), own)]
                for of_rank in gathered
            ]
        all_values, all_bits, all_ran, all_losses = zip(*ranks)
        loss, number = np.sum(all_losses, 0)  # NaN if it is NaN on any rank
        return (
            of_ranks(all_values),
            np.maximum.reduce(all_bits),  # NaN if it is NaN on any rank
            np.maximum.reduce(all_ran) > 0,
            float(loss / number) if number else math.nan,
        )

    def _log(self, trainer: Trainer, interval: Interval) -> None:
        has_steps = bool(interval["updates"].any())  # otherwise clipping is unknown
        scalars = {
            "fp8/alarms": float(len(self.alarms)),
            "fp8/clipped_bits_max": float(interval["clipped_bits"].max()) if has_steps else math.nan,
            "fp8/clipped_casts": float((interval["clipped_steps"] > 0).sum()) if has_steps else math.nan,
            "fp8/flushed_max": _extreme(interval.flushed_share, np.fmax),
            "fp8/head_room_min": _extreme(interval["head_room"], np.fmin),
        }
        if self.per_layer:
            figures = {what: interval[what] for what in ("amax", "scale", "clipped_bits")}
            for what, values in {**figures, "flushed": interval.flushed_share}.items():
                scalars |= {f"fp8/{what}/{name}": float(value) for name, value in zip(self._casts.names, values)}
        known = {name: value for name, value in scalars.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            logger.log_metrics(known, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _save(self, trainer: Trainer) -> None:
        if self.saved_to is None or self.record is None:
            return
        self._written = time.monotonic()
        plugin = trainer.precision_plugin
        if isinstance(plugin, FP8Precision) and plugin.summary is not None:
            names = "name", "shape", "precision", "reason"
            self.record.layers = [
                dict(zip(names, (row.name, " × ".join(map(str, row.shape)), row.precision, row.reason)))
                for row in plugin.summary.rows
            ]
            self.record.verdict = plugin.summary.verdict()
        self.record.alarms = [alarm.as_dict() for alarm in self.alarms]
        try:
            self.record.save(self.saved_to)
        except OSError as error:  # for example a full disk, which must not stop training
            rank_zero_warn(f"FP8Monitor could not write {self.saved_to}: {error}; the run continues without its record")
            self.saved_to = None


def _sampled_row(interval: int, every_n_steps: int) -> int:
    """The step of an interval that is sampled, from 0.

    It is the second step of the first interval, so that short runs have a sample, with the scales of a first step. In
    later intervals its distance varies (a golden ratio sequence), so that layers that run in every second step, for
    example, are sampled.
    """
    if every_n_steps == 1:
        return 0
    return 1 + int((every_n_steps - 1) * (interval * 0.6180339887498949 % 1))


def _extreme(values: Array, reduce: Any) -> float:
    return float(reduce.reduce(values)) if len(values) else math.nan


def _unused(path: Path) -> Path:
    """``path``, or the first ``name-v1.npz``, ``-v2`` and so on that does not exist."""
    found, number = path, 0
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-v{number}{path.suffix}")
    return found


def _environment(device: torch.device) -> dict[str, str]:
    started = datetime.now().astimezone().isoformat(" ", "minutes")
    versions = {"lightning_fp8": __version__, "torch": torch.__version__, "lightning": lightning.__version__}
    versions |= {"Python": platform.python_version(), "started": started}
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda), **versions}
    return {"device": f"{device.type} (FP8 is emulated)", **versions}
