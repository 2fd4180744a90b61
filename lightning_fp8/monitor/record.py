"""Record: the figures of a training run, interval by interval, and their file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fp8.files import replacing
from lightning_fp8.names import layer_of_slot
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.ops.sample import COUNTS, EXPONENTS, SAMPLED_RECIPES

Array: TypeAlias = NDArray[np.float64]

VERSION = 1
"""The version of saved records. It is increased if older code would misread a record."""

MOST_INTERVALS = 256
"""The maximum number of intervals in a record. Beyond it, neighbors are merged."""

_STEPS = ("updates", "clipped_steps", "clipped_bits", "clipped_at", "head_room", "amax", "scale", "window", "off_bits")
FIELDS = (*_STEPS, *COUNTS)
"""The figures of one cast in one interval. With delayed scaling they include (NaN or 0 with other recipes):

- ``updates``: the number of steps with an amax; ``clipped_steps``: the number of those in which the amax was clipped
- ``clipped_bits``: the largest ``log2(amax * scale / largest_rounded)``, at least 0, and ``clipped_at``, its step
- ``head_room``: the smallest ``log2(fp8_max / (amax * scale))`` of a finite amax
- ``amax``: the largest finite amax; ``scale``: the last scale
- ``window``: the amax that the last scale is computed from
- ``off_bits``: the difference in bits between the last scale and the scale of its history

All recipes have the counts of the sampled step, :data:`lightning_fp8.ops.sample.COUNTS`.
"""
INDEX = {name: index for index, name in enumerate(FIELDS)}

_SUMMED = ("updates", "clipped_steps", *COUNTS)
_RECIPES = tuple(recipe.name for recipe in SAMPLED_RECIPES)


@dataclass
class Interval:
    """The figures of some steps of a run.

    Attributes:
        first_step, last_step: the first and last step, counted from 1.
        loss: the mean training loss; NaN if it is unknown, or NaN in any step.
        values: float64 ``[n, len(FIELDS)]``, one row for each cast.
    """

    first_step: int
    last_step: int
    loss: float
    values: Array

    def __getitem__(self, name: str) -> Array:
        return self.values[:, INDEX[name]]

    @property
    def flushed_share(self) -> Array:
        """The share of nonzero finite values that became 0, for each cast; NaN if it was not sampled."""
        nonzero = self["elements"] - self["zeros"] - self["nonfinite"]
        return _ratio(self["flushed"], nonzero, nonzero > 0)

    @property
    def decibels(self) -> Array:
        """The ratio of signal to noise of each cast; NaN if it was not sampled, inf without noise."""
        return _decibels(self["signal"], self["noise"])


def _ratio(a: Array, b: Array, where: NDArray[np.bool_]) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(where, a / b, np.nan)


def _decibels(signal: Array, noise: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(10.0 * np.log10(_ratio(signal, noise, signal > 0)))


def empty_values(casts: int) -> Array:
    """The figures of an interval in which no cast ran."""
    values = np.zeros((casts, len(FIELDS)))
    values[:, [INDEX[name] for name in ("head_room", "amax", "scale", "window", "off_bits")]] = np.nan
    return values


def combined(parts: Sequence[Array]) -> Array:
    """The combined figures of several ranks, or of consecutive intervals."""
    stack = np.stack(parts)
    values = np.array(parts[-1])
    worst = np.argmax(stack[:, :, INDEX["clipped_bits"]], 0), np.arange(stack.shape[1])
    for name in ("clipped_bits", "clipped_at"):
        values[:, INDEX[name]] = stack[worst[0], worst[1], INDEX[name]]
    for name in _SUMMED:
        values[:, INDEX[name]] = stack[:, :, INDEX[name]].sum(0)
    for name, reduce in (("head_room", np.fmin), ("amax", np.fmax)):
        values[:, INDEX[name]] = reduce.reduce(stack[:, :, INDEX[name]], 0)
    for name in ("scale", "window", "off_bits"):  # the last that is known
        for part in parts:
            known = ~np.isnan(part[:, INDEX[name]])
            values[known, INDEX[name]] = part[known, INDEX[name]]
    return values


def of_ranks(parts: Sequence[Array]) -> Array:
    """The combined figures of one interval on several ranks. Samples are added, and steps are counted once."""
    values = combined(parts)
    for name in ("updates", "clipped_steps"):
        values[:, INDEX[name]] = np.max([part[:, INDEX[name]] for part in parts], 0)
    return values


@dataclass
class Record:
    """The figures of a run.

    Attributes:
        names, roles: the name and role of each cast, ``layers.0.fc1.input`` and ``input``.
        formats: the format of each cast, ``E4M3`` or ``E5M2``.
        recipe: the recipe's name; ``recipe_fields``: the whole recipe as text.
        intervals: the intervals in order.
        recipes: the names of the recipes in ``losses``.
        losses: float64 ``[n, 4, 2]``, for each cast and each of :attr:`recipes` the largest share of nonzero values
            that became 0 in a what-if sample, and the least ratio of signal to noise in decibels; NaN if unknown.
        exponents: float64 ``[n, 256]``, the histogram of the biased exponents of float32 in these samples.
        layers, alarms: the rows of the table of layers, and the alarms, as dictionaries.
        environment: the start of training, the device and versions.
    """

    names: list[str]
    roles: list[str]
    recipe: str = ""
    recipe_fields: str = ""
    intervals: list[Interval] = field(default_factory=list)
    recipes: tuple[str, ...] = _RECIPES
    losses: Array = field(default_factory=lambda: np.zeros(0))
    exponents: Array = field(default_factory=lambda: np.zeros(0))
    layers: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    alarms: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    formats: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.names)
        if not self.losses.size:
            self.losses = np.full((n, len(_RECIPES), 2), np.nan)
        if not self.exponents.size:
            self.exponents = np.zeros((n, EXPONENTS))

    def require_rows(self) -> None:
        """Raises:
        ValueError: If :attr:`layers` or :attr:`alarms` lack what a page shows.
        """
        for name, expected in _ROWS.items():
            _require(getattr(self, name), expected, name)

    @property
    def num_steps(self) -> int:
        """The number of steps in the intervals."""
        return sum(each.last_step - each.first_step + 1 for each in self.intervals)

    def layer(self, cast: int) -> str:
        """The name of the layer of a cast."""
        return layer_of_slot(self.names[cast])

    def total(self) -> Interval:
        """All intervals merged to one. It raises a ValueError if there are none."""
        if not self.intervals:
            raise ValueError("the record has no interval")
        return merged(self.intervals)

    def add(self, interval: Interval) -> None:
        """Add the next interval. If there are more than :data:`MOST_INTERVALS`, merge neighbors."""
        self.intervals.append(interval)
        if len(self.intervals) > MOST_INTERVALS:
            pairs = (self.intervals[index : index + 2] for index in range(0, len(self.intervals), 2))
            self.intervals = [merged(pair) for pair in pairs]

    def add_losses(self, counts: Array) -> None:
        """Add the errors of other recipes in one interval, ``[n, 4, 4]`` by :data:`lightning_fp8.ops.sample.LOSSES`."""
        nonzero, flushed, signal, noise = np.moveaxis(counts, -1, 0)
        self.losses[..., 0] = np.fmax(self.losses[..., 0], _ratio(flushed, nonzero, nonzero > 0))
        self.losses[..., 1] = np.fmin(self.losses[..., 1], _decibels(signal, noise))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as an ``.npz`` file. An existing file is replaced atomically."""
        described = {"version": VERSION, "fields": FIELDS, **{name: getattr(self, name) for name in _DESCRIBED}}
        steps = [[each.first_step, each.last_step] for each in self.intervals]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, open(part, "wb") as file:
            np.savez_compressed(
                file,
                description=np.array(json.dumps(described)),
                steps=np.array(steps, np.int64).reshape(-1, 2),
                loss=np.array([each.loss for each in self.intervals]),
                values=np.array([each.values for each in self.intervals]),
                losses=self.losses,
                exponents=self.exponents,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read a file of :meth:`save`. No code in it is executed.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it is not a record, or has a newer version.
        """
        try:
            if not Path(path).stat().st_size:
                raise ValueError("it is empty")
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz file, or its end is missing")
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if "description" not in arrays:
                raise ValueError("it has no description; FP8Monitor writes fp8_monitor.npz into the log_dir")
            described = json.loads(str(arrays["description"]))
            _require(described, {"version": int}, "its description")
            if (version := described["version"]) <= VERSION:
                _require(described, {"fields": [str], **_DESCRIBED}, "its description")
                return cls._from_arrays(described, arrays)
        except OSError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise ValueError(f"{path} is not a record of FP8Monitor: {error}") from None
        raise ValueError(
            f"{path} is a record of version {version}, but this lightning_fp8 reads versions up to {VERSION}. It was "
            "saved by a newer lightning_fp8: update this one, by git pull in its checkout"
        )

    @classmethod
    def _from_arrays(cls, described: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Record:
        fields = {name: described[name] for name in _DESCRIBED}
        fields["recipes"] = tuple(fields["recipes"])
        if missing := set(FIELDS) - set(described["fields"]):
            raise ValueError(f"its fields lack {sorted(missing)}")
        n = len(described["names"])
        for name, numbers in (("roles", (n,)), ("formats", (0, n))):
            if len(fields[name]) not in numbers:
                raise ValueError(f"it has {len(fields[name])} {name}, not {n}, as many as names")
        if unknown := set(fields["formats"]) - {E4M3.name, E5M2.name}:
            raise ValueError(f"its formats have {sorted(unknown)[0]!r}, which is neither {E4M3.name} nor {E5M2.name}")
        steps = len(arrays["steps"]) if "steps" in arrays else 0
        for name, of_record in (
            ("steps", (steps, 2)),
            ("loss", (steps,)),
            ("values", (steps, n, len(described["fields"])) if steps else (0,)),
            ("losses", (n, len(fields["recipes"]), 2)),
            ("exponents", (n, EXPONENTS)),
        ):
            if name not in arrays:
                raise ValueError(f"it lacks the array {name!r}")
            if arrays[name].dtype.kind not in "iuf" or arrays[name].shape != of_record:
                raise ValueError(
                    f"its array {name!r} is {arrays[name].dtype} {arrays[name].shape}, not numbers {of_record}"
                )
        order = [described["fields"].index(name) for name in FIELDS]
        intervals = [
            Interval(int(first), int(last), float(loss), of_casts[:, order])
            for (first, last), loss, of_casts in zip(arrays["steps"], arrays["loss"], arrays["values"])
        ]
        for each in intervals:
            if each.first_step > each.last_step:
                raise ValueError(f"it has an interval from step {each.first_step} to step {each.last_step}")
        return cls(**fields, intervals=intervals, losses=arrays["losses"], exponents=arrays["exponents"])


_DESCRIBED: dict[str, Any] = {
    "names": [str],
    "roles": [str],
    "formats": [str],
    "recipe": str,
    "recipe_fields": str,
    "recipes": [str],
    "layers": [dict],
    "verdict": str,
    "alarms": [dict],
    "environment": dict,
}
"""The attributes in a saved record's description, and their types. ``[str]`` is a list of strings; a dictionary has at
least these keys."""

_ROWS: dict[str, Any] = {
    "layers": [dict.fromkeys(("name", "shape", "precision", "reason"), str)],
    "alarms": [
        {
            **dict.fromkeys(("kind", "rule", "value", "cause", "consequence", "advice"), str),
            **dict.fromkeys(("first_step", "last_step"), int),
            "casts": [str],
            "skip": [str],
        }
    ],
}
"""What a page shows of the rows of the tables."""


def _require(value: Any, expected: Any, what: str) -> None:
    """Raises:
    ValueError: If ``value``, which messages call ``what``, is not of the ``expected`` types; see :data:`_DESCRIBED`.
    """
    cls: type = expected if isinstance(expected, type) else type(expected)
    found: type = type(value)
    if found is not cls:
        raise ValueError(f"{what} is {str(value)[:40]!r}, of type {found.__name__}, not {cls.__name__}")
    if isinstance(expected, list):
        for index, each in enumerate(value):
            _require(each, expected[0], f"{what}[{index}]")
    elif isinstance(expected, dict):
        for key, of_key in expected.items():
            if key not in value:
                raise ValueError(f"{what} lacks {key!r}")
            _require(value[key], of_key, f"{what}[{key!r}]")


def merged(parts: Sequence[Interval]) -> Interval:
    """Merge consecutive intervals. The loss is the mean over their steps; NaN if one of them is NaN."""
    steps = [each.last_step - each.first_step + 1 for each in parts]
    loss = sum(each.loss * number for each, number in zip(parts, steps)) / sum(steps)
    return Interval(parts[0].first_step, parts[-1].last_step, loss, combined([each.values for each in parts]))
