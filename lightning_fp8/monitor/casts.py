"""The figures of a model's casts: of every step with delayed scaling, and of the sampled steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_fp8.delayed.history import AmaxHistory, Sample, Slot
from lightning_fp8.modules.linear_layer import LinearLayer
from lightning_fp8.modules.state import fp8_modules
from lightning_fp8.monitor.record import INDEX, Array, empty_values
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.ops.sample import COUNTS, EXPONENTS, LOSSES, SAMPLED_RECIPES

_MORE_STEPS = 16
"""Rows in addition to those of an interval: one batch may step several times. More are allocated when needed."""

_SAMPLE_SHAPES = (len(COUNTS),), (len(SAMPLED_RECIPES), len(LOSSES)), (EXPONENTS,)
"""Of a cast's counts, losses and exponents."""


class Casts(NamedTuple):
    """The casts of the linear layers of a model: their names, roles, slots and layers."""

    names: list[str]
    roles: list[Role]
    slots: list[Slot]
    layers: list[LinearLayer]

    @classmethod
    def of(cls, model: nn.Module) -> Casts:
        """The casts of the layers of ``model`` that run in FP8."""
        layers = [(name, each) for name, each in fp8_modules(model) if isinstance(each, LinearLayer) and each.fp8]
        named = [(*pair, layer) for name, layer in layers for pair in layer.named_slots(name)]
        return cls(
            [name for name, _, _ in named],
            [slot.history.roles[slot.index] for _, slot, _ in named],
            [slot for _, slot, _ in named],
            [layer for _, _, layer in named],
        )

    def ran_unobserved(self) -> NDArray[np.bool_]:
        """Whether the layer of each cast has run in FP8 as far as its record shows, ``[n]``.

        The casts of a layer without gradients, such as those of a teacher, have no amaxes and are not sampled.
        """
        records = (layer.record for layer in self.layers)
        return np.array([bool(each.fp8 or each.evaluations_in_fp8) for each in records], bool)


class StepRows(NamedTuple):
    """The amaxes and scales of the casts in each step of an interval, ``[steps, n]``; amax 0 if a cast did not run."""

    amax: Array
    scale: Array

    @classmethod
    def zeros(cls, steps: int, casts: int) -> StepRows:
        """Rows in which no cast ran."""
        return cls(np.zeros((steps, casts)), np.zeros((steps, casts)))


class StepTrace:
    """Copies amaxes and scales of histories before each update, without waiting for a GPU.

    Attributes:
        row: the index of the current step in the interval.
    """

    def __init__(self, slots: Sequence[Slot], steps: int) -> None:
        self.row = 0
        self._slots = slots
        self._steps = steps + _MORE_STEPS  # rows to allocate
        self._rows: dict[AmaxHistory, tuple[Tensor, Tensor]] = {}
        for history in self.histories:
            history.before_update = self.before_update

    @property
    def histories(self) -> list[AmaxHistory]:
        """The histories without duplicates, in the order of the slots."""
        return list(dict.fromkeys(slot.history for slot in self._slots))

    def stop(self) -> None:
        """Stop copying."""
        for history in self.histories:
            history.before_update = None

    @torch.no_grad()
    def before_update(self, history: AmaxHistory) -> None:
        """Copy the amaxes of this step. If several optimizers step, each update has those of its own tensors."""
        if history not in self._rows or self._rows[history][0].device != history.amax.device:
            rows = history.amax.new_zeros(self._steps, len(history.names))
            self._rows[history] = rows, rows.clone()
        while self.row >= len(self._rows[history][0]):
            amax, scale = (torch.cat([rows, torch.zeros_like(rows)]) for rows in self._rows[history])
            self._rows[history] = amax, scale
        amax, scale = (rows.select(0, self.row) for rows in self._rows[history])
        torch.where(history.amax != 0, history.scale, scale, out=scale)
        torch.maximum(amax, history.amax, out=amax)

    def read(self, steps: int) -> StepRows:
        """Return the rows of the first ``steps`` steps, and clear all rows."""
        of_history = {
            history: tuple(rows[:steps].cpu().double().numpy() for rows in pair) for history, pair in self._rows.items()
        }
        for pair in self._rows.values():
            for rows in pair:
                rows.zero_()
        found = StepRows.zeros(steps, len(self._slots))
        for column, slot in enumerate(self._slots):
            for values, known in zip(found, of_history.get(slot.history, ())):
                values[: len(known), column] = known[:, slot.index]
        return found

    def followed_amax(self, recipe: DelayedScaling, rows: StepRows) -> Array:
        """The amaxes that the current scales are computed from, the largest or the newest of each history, ``[n]``.

        A history of one amax is cleared by the update, and its amax is that of the last of ``rows``.
        """
        if recipe.amax_history_len == 1 and len(rows.amax):
            return rows.amax[-1]
        found = {}
        for history in self.histories:
            window = history.amax_history
            if not len(window):
                followed = torch.zeros_like(history.scale)
            else:
                followed = window.amax(0) if recipe.amax_compute_algo == "max" else window[-1]
            found[history] = followed.cpu().double().numpy()
        return np.array([found[slot.history][slot.index] for slot in self._slots])


class Sampler:
    """Samples casts in the steps between :meth:`begin` and :meth:`end`."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._samples: list[Sample] = []

    def begin(self, what_if: bool) -> None:
        """Start counting. ``what_if`` also counts the errors of other recipes."""
        if not self._samples:
            # One tensor for each cast: compiled code would treat two views of one tensor as one input.
            for slot in self._slots:
                like: Any = {"dtype": torch.float64, "device": slot.scale.device}
                self._samples.append(Sample(*(torch.zeros(shape, **like) for shape in _SAMPLE_SHAPES)))
        for slot, sample in zip(self._slots, self._samples):
            slot.sample = sample if what_if else Sample(sample.counts)

    def end(self) -> None:
        """Stop counting."""
        for slot in self._slots:
            slot.sample = None

    def read(self) -> tuple[Array, Array, Array]:
        """Return and clear counts ``[n, 8]``, losses ``[n, 4, 4]`` and exponents ``[n, 256]``."""
        if not self._samples:
            counts, losses, exponents = (np.zeros((len(self._slots), *shape)) for shape in _SAMPLE_SHAPES)
            return counts, losses, exponents
        counts, losses, exponents = (torch.stack(each).cpu().numpy() for each in zip(*self._samples))
        for sample in self._samples:
            for each in sample:
                if each is not None:
                    each.zero_()
        return counts, losses, exponents


def clipped_bits(rows: StepRows, largest: Array) -> Array:
    """``max(0, log2(amax * scale / largest))`` of each step and cast; NaN if the amax is not finite.

    Args:
        largest: the largest magnitude that rounds to the format's largest value, ``[n]``.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(rows.amax * rows.scale / largest)
    bits = np.where((rows.amax > 0) & (rows.scale > 0), np.maximum(bits, 0), 0)
    return np.where(np.isfinite(rows.amax), bits, np.nan)


def off_bits(rows: StepRows, window: Array, fp8_max: Array, recipe: DelayedScaling) -> Array:
    """The difference in bits between the scale of the last step and the scale of its history, ``[n]``; NaN if unknown.

    The amax of the previous step is in the history, whatever its length, so a scale that is too large for it was not
    updated. Neither was a scale that is too small for all of ``window``, the amaxes after the last step.
    """
    unknown = np.full(rows.amax.shape[1], np.nan)
    if len(rows.amax) < 2 or recipe.interval > 1:
        return unknown
    before, scale = rows.amax[-2], rows.scale[-1] * 2.0**recipe.margin / fp8_max
    follows = before if recipe.amax_compute_algo == "most_recent" else window
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.fmax(np.log2(scale * before), -np.log2(scale * follows))
    known = (before > 0) & (rows.amax[-1] > 0) & (rows.scale[-1] > 0) & np.isfinite(bits)
    return np.where(known, np.maximum(bits, 0), unknown)


def step_figures(rows: StepRows, bits: Array, fp8_max: Array, first_step: int) -> Array:
    """The figures of an interval that are known in every step with delayed scaling, ``[n, len(FIELDS)]``.

    ``bits`` are :func:`clipped_bits`, and ``first_step`` is the number of the first row's step.
    """
    values = empty_values(rows.amax.shape[1])
    if not len(rows.amax):
        return values
    ran, finite = rows.amax != 0, np.nan_to_num(bits)
    amax = np.where(ran & np.isfinite(rows.amax), rows.amax, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where(rows.scale > 0, np.log2(fp8_max / (amax * rows.scale)), np.nan)
    values[:, INDEX["updates"]] = ran.sum(0)
    values[:, INDEX["clipped_steps"]] = (finite > 0).sum(0)
    values[:, INDEX["clipped_bits"]] = finite.max(0)
    values[:, INDEX["clipped_at"]] = np.where(finite.max(0) > 0, first_step + finite.argmax(0), 0)
    values[:, INDEX["head_room"]] = np.fmin.reduce(room, 0)
    last = len(ran) - 1 - ran[::-1].argmax(0)  # the last row in which each cast ran
    values[:, INDEX["scale"]] = np.where(ran.any(0), rows.scale[last, np.arange(ran.shape[1])], np.nan)
    values[:, INDEX["amax"]] = np.fmax.reduce(amax, 0)
    return values
