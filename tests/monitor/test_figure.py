"""The picture for loggers: who gets it, and that it shows the record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_fp8.monitor.figure import log_figure, lost
from tests.monitor.recorded import baseline, record

pytest.importorskip("matplotlib")


def test_cells_are_those_of_the_record() -> None:
    run = record()
    images = [image for axis in lost(run).axes for image in axis.get_images()]
    assert len(images) == 6
    clipped, *_, flushed = (np.ma.filled(image.get_array(), np.nan) for image in images)
    assert clipped[0].tolist()[2] == 5.0
    assert np.isnan(clipped).sum() == clipped.size - 1
    shares = np.stack([each["flushed"][2::3] / 4000 for each in run.intervals], 1)
    np.testing.assert_allclose(flushed, shares)


def test_loggers_that_take_pictures_get_it() -> None:
    calls: list[Any] = []
    tensorboard = SimpleNamespace(experiment=SimpleNamespace(add_figure=lambda *args: calls.append(args)))
    wandb = SimpleNamespace(log_image=lambda **args: calls.append(args), experiment=None)
    mlflow = SimpleNamespace(experiment=SimpleNamespace(log_figure=lambda *args: calls.append(args)), run_id="7")
    csv = SimpleNamespace(experiment=SimpleNamespace())
    log_figure([tensorboard, wandb, mlflow, csv], record(), 42)
    assert calls[0][0] == "fp8/lost"
    assert calls[0][2] == 42
    assert calls[1]["key"] == "fp8/lost"
    assert calls[1]["step"] == 42
    assert (calls[2][0], calls[2][2]) == ("7", "fp8/lost.png")
    figures = [calls[0][1], calls[1]["images"][0], calls[2][1]]
    assert all(type(each).__name__ == "Figure" for each in figures)
    calls.clear()
    log_figure([tensorboard], baseline(), 42)
    log_figure([tensorboard], record(intervals=0), 42)
    assert calls == []
