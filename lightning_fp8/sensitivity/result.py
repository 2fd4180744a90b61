"""Sensitivity: the errors of layers in FP8, ranked, and what to keep in BF16 for an error budget."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_fp8.files import replacing

VERSION = 1
"""Of saved results."""


@dataclass(frozen=True)
class Row:
    """The result of one layer or block.

    Attributes:
        name: the name of the layer or block.
        layers: the names of its layers.
        error: ``|g - g0| / |g0|``, where g is the model's gradient with only these layers in FP8, and g0 without FP8.
        flops: the share of the FLOPs of all layers that can run in FP8.
    """

    name: str
    layers: tuple[str, ...]
    error: float
    flops: float


@dataclass(frozen=True)
class Check:
    """The result of a ``skip`` list for a budget.

    Attributes:
        budget: the requested error.
        skip: the layers in BF16.
        predicted: the error of the gradient that the rows predict.
        measured: the measured error of the gradient.
    """

    budget: float
    skip: tuple[str, ...]
    predicted: float
    measured: float


@dataclass(frozen=True)
class Sensitivity:
    """The result of :func:`lightning_fp8.sensitivity.measure_sensitivity`. ``str()`` is :meth:`table`.

    Attributes:
        recipe: the recipe's name.
        rows: the rows, most sensitive first.
        all_error: the error of the gradient with all layers in FP8.
        default_error: the error with the layers in BF16 that a plugin keeps by default.
        default_skip: these layers.
        passes: the number of forward and backward passes.
        check: the result for the budget, if there was one.
    """

    recipe: str
    rows: tuple[Row, ...]
    all_error: float
    default_error: float
    default_skip: tuple[str, ...]
    passes: int
    check: Check | None = None

    def predicted(self, skip: Collection[str]) -> float:
        """The error with ``skip`` in BF16: the root of the sum of squares of the other rows' errors.

        Rounding errors of layers are nearly independent, so their squares add up.
        """
        return math.sqrt(math.fsum(row.error**2 for row in self.rows if not set(row.layers) <= set(skip)))

    def skip(self, budget: float) -> tuple[str, ...]:
        """The layers to keep in BF16 so that the predicted error is at most ``budget``.

        Rows are added in the order of the squared error that they save per FLOP.

        Raises:
            ValueError: If ``budget`` is not a positive number.
        """
        require_budget(budget)
        kept: list[str] = []
        for row in sorted(self.rows, key=lambda row: -(row.error**2) / max(row.flops, 1e-12)):
            if self.predicted(kept) <= budget:
                break
            kept += row.layers
        return tuple(kept)

    def flops_in_fp8(self, skip: Collection[str]) -> float:
        """The share of the FLOPs in FP8 with ``skip`` in BF16."""
        return math.fsum(row.flops for row in self.rows if not set(row.layers) <= set(skip))

    def table(self, most: int = 30) -> str:
        """The ranking in lines of at most 80 columns."""
        lines = [f"{f'in FP8 alone, recipe {self.recipe}':<50}{'error of the gradient':>21}{'FLOPs':>9}"]
        lines += [f"{_short(row.name, 50):<50}{row.error:>21.3%}  {row.flops:>7.1%}" for row in self.rows[:most]]
        if len(self.rows) > most:
            lines.append(f"{len(self.rows) - most} more, of smaller errors")
        kept = self.flops_in_fp8(self.default_skip)
        lines += [
            f"{'all layers in FP8':<50}{self.all_error:>21.3%}  {1:>7.1%}",
            f"{f'the default: {len(self.default_skip)} layers in BF16':<50}{self.default_error:>21.3%}  {kept:>7.1%}",
        ]
        if check := self.check:
            text = f"skip, below: {len(check.skip)} layers in BF16"
            lines += [
                f"{text:<50}{check.measured:>21.3%}  {self.flops_in_fp8(check.skip):>7.1%}",
                f"predicted: {check.predicted:.3%}; asked for: {check.budget:.3%}",
                f"skip={check.skip!r}",
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, infinite errors as null. An existing file is replaced atomically.

        Raises:
            OSError: If it cannot be written, for example to a folder.
        """
        text = json.dumps(_without_inf({"version": VERSION, **asdict(self)}), indent=1, allow_nan=False)
        with replacing(path) as part:
            part.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivity:
        """Read a file of :meth:`save`.

        Raises:
            ValueError: If it is not such a file, or has a newer version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            found: dict[str, Any] = json.loads(text, object_hook=_with_inf)
            if found.pop("version") > VERSION:
                raise ValueError("a newer lightning_fp8 saved it; update this one, by git pull in its checkout")
            rows = tuple(Row(**{**each, "layers": tuple(each["layers"])}) for each in found.pop("rows"))
            if (check := found.pop("check")) is not None:
                check = Check(**{**check, "skip": tuple(check["skip"])})
            return cls(rows=rows, check=check, default_skip=tuple(found.pop("default_skip")), **found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is not a result of measure_sensitivity: {said}") from None

    def plot(self, path: str | os.PathLike[str], most: int = 40) -> None:
        """Plot the ranking as bars.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # not pyplot, which has the state of a notebook
        except ModuleNotFoundError:
            raise ModuleNotFoundError("a plot needs matplotlib; install it: pip install matplotlib") from None

        rows = self.rows[:most][::-1]
        figure = Figure(figsize=(8, 1.2 + 0.24 * len(rows)), layout="constrained")
        axes: Any = figure.subplots()
        axes.barh([_short(row.name, 40) for row in rows], [100 * row.error for row in rows], color="#0b5cad")
        for error, text, style in ((self.all_error, "all layers", "-"), (self.default_error, "default", "--")):
            axes.axvline(100 * error, color="#b45309", linestyle=style, label=f"{text}: {error:.2%}")
        axes.set_xlabel(f"error of the gradient with only this in FP8, %, recipe {self.recipe}")
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=110)


_ERRORS = ("error", "all_error", "default_error", "predicted", "measured")


def _without_inf(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_inf(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_inf(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _with_inf(found: dict[str, Any]) -> dict[str, Any]:
    return {name: math.inf if each is None and name in _ERRORS else each for name, each in found.items()}


def require_budget(budget: float) -> None:
    """Raise a ValueError if ``budget`` is not a positive number."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise ValueError(
            f"budget={budget!r} must be a positive number: the relative error of the gradient, 0.01 for 1 %"
        )


def _short(name: str, width: int) -> str:
    return name if len(name) < width else f"…{name[len(name) - width + 2 :]}"
