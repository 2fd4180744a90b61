"""Record: what a monitor saw of a training run, interval by interval, and the file that keeps it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from lightning_fp8.names import layer_of_slot
from lightning_fp8.ops.sample import COUNTS, EXPONENTS, LOSSES, SAMPLED_RECIPES

Array: TypeAlias = NDArray[np.float64]

VERSION = 1
"""The version of saved records. A new version is one that this code would read wrongly."""

MOST_INTERVALS = 256
"""Intervals that a record holds. At more, neighbours are merged."""

_STEPS = ("updates", "clipped_steps", "clipped_bits", "clipped_at", "head_room", "amax", "scale", "window", "off_bits")
FIELDS = (*_STEPS, *COUNTS)
"""The figures of one cast in one interval, of delayed scaling at every step (NaN or 0 of other recipes):

- ``updates``: steps in which it had an amax; ``clipped_steps``: those in which its amax lost more than rounding;
- ``clipped_bits``: ``log2(amax * scale / largest_rounded)`` of the worst, else 0, and ``clipped_at``, its step;
- ``head_room``: the least ``log2(fp8_max / (amax * scale))``;
- ``amax``: the largest; ``scale`` and ``window``, the amax of the history that scales follow: the last;
- ``off_bits``: by how many bits the last scale differed from what its history gave; 0 where it followed;

and those of the sampled step, :data:`lightning_fp8.ops.sample.COUNTS`.
"""
INDEX = {name: index for index, name in enumerate(FIELDS)}

_SUMMED = ("updates", "clipped_steps", *COUNTS)
_RECIPES = tuple(recipe.name for recipe in SAMPLED_RECIPES)


@dataclass
class Interval:
    """Some steps of a run.

    Attributes:
        first_step, last_step: counted from 1, both included.
        loss: the mean training loss; NaN where none is known.
        values: float64 ``[n, len(FIELDS)]``, a row for each cast.
    """

    first_step: int
    last_step: int
    loss: float
    values: Array

    def __getitem__(self, name: str) -> Array:
        return self.values[:, INDEX[name]]

    @property
    def flushed_share(self) -> Array:
        """The share of nonzero finite values that became 0, of each cast; NaN where nothing was sampled."""
        return _ratio(self["flushed"], self["elements"] - self["zeros"] - self["nonfinite"])

    @property
    def clipped_share(self) -> Array:
        """The share of values that were clipped."""
        return _ratio(self["clipped"], self["elements"])

    @property
    def decibels(self) -> Array:
        """The ratio of signal to noise of each cast; NaN where nothing was sampled, inf without noise."""
        with np.errstate(divide="ignore"):
            decibels: Array = 10.0 * np.log10(_ratio(self["signal"], self["noise"], where=self["signal"] > 0))
        return decibels


def _ratio(a: Array, b: Array, where: Any = True) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = np.where((a + b > 0) & where, a / b, np.nan)
    return result


def empty_values(casts: int) -> Array:
    """The figures of an interval in which nothing happened."""
    values = np.zeros((casts, len(FIELDS)))
    values[:, [INDEX[name] for name in ("head_room", "amax", "scale", "window", "off_bits")]] = np.nan
    return values


def combined(parts: Sequence[Array]) -> Array:
    """The figures of several ranks, or of intervals in their order, taken together."""
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
    """The figures of one interval on several ranks: what each sampled is added, steps are counted once."""
    values = combined(parts)
    for name in ("updates", "clipped_steps"):
        values[:, INDEX[name]] = np.max([part[:, INDEX[name]] for part in parts], 0)
    return values


@dataclass
class Record:
    """What a monitor saw of a run.

    Attributes:
        names, roles: of each cast, ``layers.0.fc1.input`` and ``input``.
        formats: of each cast, ``E4M3`` or ``E5M2``.
        recipe: the recipe's name; ``recipe_fields``: all of it, as text.
        intervals: in their order.
        recipes: the names of the recipes that ``losses`` are of.
        losses: float64 ``[n, 4, 4]``, of all what-if samples: casts by :attr:`recipes` by
            :data:`lightning_fp8.ops.sample.LOSSES`.
        exponents: float64 ``[n, 256]``, of them a histogram of the biased exponents of float32.
        layers: the plan and what ran, a mapping of each row of the table of layers.
        alarms: a mapping for each.
        environment: names and versions of what the run ran on.
        seconds: what the steps of the run took on the clock, and what the monitor took of them.
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
            self.losses = np.zeros((n, len(_RECIPES), len(LOSSES)))
        if not self.exponents.size:
            self.exponents = np.zeros((n, EXPONENTS))

    @property
    def num_steps(self) -> int:
        """Steps that the intervals cover."""
        return sum(each.last_step - each.first_step + 1 for each in self.intervals)

    @property
    def num_samples(self) -> int:
        """Intervals in which casts were sampled; of merged ones, fewer."""
        return sum(bool(each["casts"].any()) for each in self.intervals)

    def layer(self, cast: int) -> str:
        """The name of the layer of a cast."""
        return layer_of_slot(self.names[cast])

    def total(self) -> Interval:
        """All intervals as one.

        Raises:
            ValueError: there is none.
        """
        if not self.intervals:
            raise ValueError("the record has no interval")
        return merged(self.intervals)

    def add(self, interval: Interval) -> None:
        """Add the next interval; at more than :data:`MOST_INTERVALS` merge neighbours."""
        self.intervals.append(interval)
        if len(self.intervals) > MOST_INTERVALS:
            pairs = (self.intervals[index : index + 2] for index in range(0, len(self.intervals), 2))
            self.intervals = [merged(pair) for pair in pairs]

    def save(self, path: Path) -> None:
        """Write the record as an ``.npz`` file, which replaces another one at once."""
        described = {
            "version": VERSION,
            "fields": FIELDS,
            **{name: getattr(self, name) for name in _DESCRIBED},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(part, "wb") as file:
                np.savez_compressed(
                    file,
                    description=np.array(json.dumps(described)),
                    steps=np.array([[each.first_step, each.last_step] for each in self.intervals], np.int64).reshape(
                        -1, 2
                    ),
                    loss=np.array([each.loss for each in self.intervals]),
                    values=np.array([each.values for each in self.intervals]),
                    losses=self.losses,
                    exponents=self.exponents,
                )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path | str) -> Record:
        """Read what :meth:`save` wrote; nothing of the file is executed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no record, or one of a newer version.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            described = json.loads(str(arrays["description"]))
            version, missing = described["version"], set(FIELDS) - set(described["fields"])
            if missing and version <= VERSION:
                raise ValueError(f"it lacks {sorted(missing)}")
            if version <= VERSION:
                return cls._from_arrays(described, arrays)
        except (BadZipFile, zlib.error, EOFError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no record of FP8Monitor: {error}") from None
        raise ValueError(
            f"{path} is a record of version {version}, but this lightning_fp8 reads versions up to {VERSION}. It was "
            "saved by a newer lightning_fp8: upgrade with pip install -U lightning-fp8"
        )

    @classmethod
    def _from_arrays(cls, described: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Record:
        order = [described["fields"].index(name) for name in FIELDS]
        shape = len(arrays["steps"]), len(described["names"]), len(described["fields"])
        intervals = [
            Interval(int(first), int(last), float(loss), of_casts[:, order])
            for (first, last), loss, of_casts in zip(
                arrays["steps"], arrays["loss"], arrays["values"].reshape(shape), strict=True
            )
        ]
        fields = {name: described[name] for name in _DESCRIBED}
        fields["recipes"] = tuple(fields["recipes"])
        return cls(**fields, intervals=intervals, losses=arrays["losses"], exponents=arrays["exponents"])


_DESCRIBED = (
    "names", "roles", "formats", "recipe", "recipe_fields", "recipes", "layers", "verdict", "alarms", "environment",
)  # fmt: skip


def merged(intervals: Iterable[Interval]) -> Interval:
    """Intervals that follow each other as one; its loss is the mean of theirs, by steps."""
    parts = list(intervals)
    known = [(each.loss, each.last_step - each.first_step + 1) for each in parts if not np.isnan(each.loss)]
    loss = sum(loss * steps for loss, steps in known) / sum(steps for _, steps in known) if known else np.nan
    return Interval(parts[0].first_step, parts[-1].last_step, loss, combined([each.values for each in parts]))
