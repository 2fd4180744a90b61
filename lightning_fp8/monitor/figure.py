"""A picture of a run for loggers that take one: what is clipped and flushed, layers by steps."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from lightning_fp8.monitor.record import Array, Record
from lightning_fp8.monitor.report.data import ROLES

NAME = "fp8/lost"
"""What loggers call it."""


def lost(record: Record) -> Any:
    """A figure of matplotlib: clipped bits above, shares flushed to zero below, of inputs, weights and gradients."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    clipped = np.stack([each["clipped_bits"] for each in record.intervals], 1)
    flushed = np.stack([each.flushed_share for each in record.intervals], 1)
    kinds: tuple[tuple[str, Array, Any, str], ...] = (
        ("clipped, bits", np.where(clipped > 0, clipped, np.nan), Normalize(0, 8), "Oranges"),
        ("flushed to 0", np.where(flushed > 0, flushed, np.nan), LogNorm(1e-5, 1), "Blues"),
    )
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3, sharex=True, squeeze=False)
    steps = record.intervals[0].first_step, record.intervals[-1].last_step
    for row, (title, values, norm, colours) in zip(axes, kinds):
        for axis, (role, of_role) in zip(row, ROLES.items()):
            casts = [index for index, each in enumerate(record.roles) if each == role]
            extent = (steps[0] - 0.5, steps[1] + 0.5, len(casts) - 0.5, -0.5)
            image = axis.imshow(
                values[casts], aspect="auto", norm=norm, cmap=colours, interpolation="nearest", extent=extent
            )
            axis.set_title(f"{of_role.lower()}: {title}", loc="left", size=9)
            axis.set_facecolor("#f1f3f6")
            named = casts if len(casts) <= 40 and role == "input" else []
            axis.set_yticks(range(len(named)), [record.layer(each) for each in named], size=6)
        figure.colorbar(image, ax=row, pad=0.01)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    return figure


def log_figure(loggers: list[Any], record: Record, step: int) -> None:
    """Log the figure to loggers that support images, such as Lightning's for TensorBoard, W&B and MLflow.

    There is no figure without matplotlib, or for a run without casts.
    """
    takers = [taker for each in loggers if (taker := _taker(each, step))]
    if takers and record.names and record.intervals and find_spec("matplotlib") is not None:
        figure = lost(record)
        for take in takers:
            take(figure)


def _taker(logger: Any, step: int) -> Callable[[Any], object] | None:
    """The function that logs a figure; None if ``logger`` takes none."""
    if hasattr(logger, "log_image"):
        return lambda figure: logger.log_image(key=NAME, images=[figure], step=step)
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):
        return lambda figure: experiment.add_figure(NAME, figure, step)
    if hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
        return lambda figure: experiment.log_figure(logger.run_id, figure, f"{NAME}.png")
    return None
