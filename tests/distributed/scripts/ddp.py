"""Run by two processes of ``torch.distributed``: trains under DDP and writes what each rank saw.

``python -m tests.distributed.scripts.ddp FOLDER PART``, with RANK, WORLD_SIZE and MASTER_* set. A part is a function
below and its argument: ``scales 2``, ``monitored delayed``, ``resume delayed``, ``te_resume te`` with Transformer
Engine's files in ``FOLDER/te``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist

from lightning_fp8 import DelayedScaling, FP8Monitor
from lightning_fp8.delayed import update
from tests.distributed.launch import leave
from tests.small import Regression, equal_weights, fp8_trainer, quiet_trainer, regression_data


class Record(L.Callback):
    """The amaxes of this rank before each update, the scales after it, and the collectives of the update."""

    def __init__(self) -> None:
        self.amax: list[list[float]] = []
        self.scales: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.amax.append(trainer.precision_plugin.histories["model"].amax.tolist())

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.histories["model"].scale.tolist())


def count_collectives() -> list[str]:
    """Every collective that Python starts, by name; DDP's own gradient buckets start in C++."""
    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor"):
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    return calls


def scales(folder: Path, accumulate: str) -> dict[str, Any]:
    L.seed_everything(1)
    record = Record()
    trainer = fp8_trainer("delayed", strategy="ddp", devices=2, max_epochs=2, accumulate_grad_batches=int(accumulate))
    trainer.callbacks.insert(0, record)  # before FP8Callback, so that it sees amaxes that are not reduced yet
    update_histories, updates = update.update, []

    def counted_update(*args: Any) -> None:
        before = len(calls)
        update_histories(*args)
        updates.append(calls[before:])

    calls = count_collectives()
    with patch.object(update, "update", counted_update):
        trainer.fit(Regression(), regression_data())
    in_fp8 = Counter(calls)
    calls.clear()
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "accumulate_grad_batches": int(accumulate)}
    quiet_trainer(precision="bf16-true", **options).fit(Regression(), regression_data())
    return {
        "amax": record.amax,
        "scales": record.scales,
        "updates": updates,
        "steps": trainer.global_step,
        "more_than_bf16": dict(in_fp8 - Counter(calls)),
    }


def monitored(folder: Path, recipe: str) -> dict[str, Any]:
    """The figures that the monitor of each rank has of two intervals, its losses, and the collectives that it adds."""
    calls = count_collectives()

    def train(*callbacks: L.Callback) -> tuple[Regression, Counter[str]]:
        L.seed_everything(1)
        calls.clear()
        model = Regression()
        fp8_trainer(recipe, callbacks, strategy="ddp", devices=2, max_epochs=4).fit(model, regression_data())
        return model, Counter(calls)

    monitor = FP8Monitor(4, path=folder / "run.npz")
    model, with_monitor = train(monitor)
    plain, without = train()
    assert monitor.record is not None
    return {
        "losses": model.losses,
        "same": equal_weights(model, plain),
        "more": dict(with_monitor - without),
        "intervals": [
            {"loss": each.loss, **{name: each[name].tolist() for name in ("casts", "elements", "signal", "updates")}}
            for each in monitor.record.intervals
        ],
        "saved": monitor.saved_to is not None,
        "names": monitor.record.names,
    }


def resume(folder: Path, recipe: str, ours: bool = False) -> dict[str, Any]:
    """Whether a training that goes on from a file is the same to the bit; of ``ours`` or of converted modules."""

    def train(epochs: int, ckpt_path: Path | None = None) -> tuple[L.Trainer, Regression]:
        L.seed_everything(1)
        model = Regression(ours)
        trainer = fp8_trainer(recipe, strategy="ddp", devices=2, max_epochs=epochs)
        trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
        return trainer, model

    _, straight = train(3)
    first, half = train(1)
    first.save_checkpoint(folder / f"{recipe}{ours}.ckpt")
    _, resumed = train(3, folder / f"{recipe}{ours}.ckpt")
    return {
        "losses": half.losses + resumed.losses == straight.losses,
        "count": len(resumed.losses),
        "weights": equal_weights(resumed, straight),
    }


def resume_ours(folder: Path, recipe: str) -> dict[str, Any]:
    return resume(folder, recipe, ours=True)


def te_resume(folder: Path, files: str) -> dict[str, Any]:
    """From each Transformer Engine file: the first step's scales, and whether what we save then resumes exactly."""
    result = {}
    folder = folder / files
    for path in sorted(folder.glob("*.ckpt")):
        first_scales: dict[str, float] = {}

        class First(L.Callback):
            def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
                history = trainer.precision_plugin.histories["model"]
                if not first_scales:  # noqa: B023
                    first_scales.update(zip(history.names, history.scale.tolist()))  # noqa: B023

        def train(epochs: int, ckpt_path: Path) -> tuple[L.Trainer, Regression]:
            L.seed_everything(1)
            trainer = fp8_trainer(DelayedScaling(amax_history_len=8), strategy="ddp", devices=2, max_epochs=epochs)
            trainer.callbacks.append(First())
            model = Regression()
            trainer.fit(model, regression_data(), ckpt_path=ckpt_path)
            return trainer, model

        first, half = train(2, path)
        scales = dict(first_scales)
        first.save_checkpoint(folder / "saved" / path.name)
        _, straight = train(4, path)
        _, resumed = train(4, folder / "saved" / path.name)
        result[path.stem] = {
            "scales": scales,
            "losses": half.losses + resumed.losses == straight.losses,
            "count": len(straight.losses),
            "weights": equal_weights(resumed, straight),
        }
    return result


if __name__ == "__main__":
    folder, (part, argument) = Path(sys.argv[1]), sys.argv[2].split()
    torch.set_num_threads(1)
    report = {each.__name__: each for each in (scales, monitored, resume, resume_ours, te_resume)}[part](
        folder, argument
    )
    (folder / f"{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
    leave()
