"""The one thing that changes between steps: amaxes, their history, and the scales of delayed scaling.

One :class:`AmaxHistory` serves a whole model, as one ``GradScaler`` does. It holds names, never modules; a module
holds a :class:`Slot` for each of its roles. Within a step scales are constant and observing is
``amax = max(amax, max |x|)``, so a recomputed forward, a micro-batch, a second call of a shared layer and another
rank fold in by the same operation, in any order.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.host_copy import HostCopy
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.saved import validated_state
from lightning_fp8.scaled import Role
from lightning_fp8.scaling import FLOAT32_MAX
from lightning_fp8.spans import Span, saved_span, span_in, span_of, span_ratio

PATIENCE = 1000
"""Training forwards without any optimizer step after which a warning says so; more than steps have micro-batches."""

UNOBSERVED = 100
"""Updates after which a warning says that the model trains in eval mode."""

_serial = itertools.count()
_newest = -1
"""The serial of the newest history that an update knew."""
_not_for_inference = torch.inference_mode(False)
"""State made while ``inference_mode`` rules has to change outside it too."""
_living: weakref.WeakSet[AmaxHistory] = weakref.WeakSet()


class AmaxHistory:
    """Amaxes and scales of the named rows.

    Attributes:
        names: one name per row, ``layers.0.fc1.input``.
        roles: one role per row; decides the row's format.
        amax: float32 ``[n]``, the largest \\|x\\| since the last update.
        amax_history: float32 ``[len, n]``, amaxes of earlier steps, oldest first. An update reduces ``len`` of them,
            the newest among them, and then clears the oldest: between updates the first row is 0.
        scale: float32 ``[n]``; 0 until the first update, which casts the tensor by its own amax.
        updates: how many updates there were.
        counts: float32 ``[n]``, in how many updates a row had an amax; what ``interval`` counts.
        steps: optimizer steps since the last update; -1 where no optimizer that owns the weights has stepped yet.
        stepped: whether an optimizer that owns the weights has ever stepped, in this process.
        waited: training forwards since the last update, as far as somebody counts them.
        trained_in_eval: whether since the last update weights had gradients taken in eval mode.
        unobserved: updates in a row that found nothing because of it; -1 once it was told.
        owners: the modules whose parameters tell an optimizer that steps these amaxes.
        recipe: what the amaxes since the last update were observed under, where the host knows; ``None`` elsewhere.
        span: the format and margin that the scales were made for; ``None`` where none was made or nobody knows.
        after_step: who updates as soon as an optimizer has stepped; ``None`` leaves it to the next training region.

    ``amax`` and ``scale`` are changed in place only: the tensors of :class:`Slot` lie in them.
    """

    _largest: tuple[Any, Tensor] | None = None
    after_step: Callable[[], None] | None = None
    patience = PATIENCE
    stepped = trained_in_eval = False
    unobserved = 0
    recipe: DelayedScaling | None = None
    span: Span | None = None

    @_not_for_inference
    def __init__(self, rows: Sequence[tuple[str, Role]], device: torch.device | str = "cpu") -> None:
        self.names = [name for name, _ in rows]
        self.roles = [role for _, role in rows]
        self.amax = torch.zeros(len(rows), dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(0, len(rows), dtype=torch.float32, device=device)
        self.scale = torch.zeros(len(rows), dtype=torch.float32, device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.float32, device=device)
        self.updates, self.steps, self.waited = 0, -1, 0
        self.scaled = HostCopy()
        self._register()

    def _register(self) -> None:
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.serial = next(_serial)
        _living.add(self)
        self._rows = [(self.scale.new_empty(0), self.amax.new_empty(0)) for _ in self.names]
        self._place_rows()

    def _place_rows(self) -> None:
        """Put the tensors of every row where ``scale`` and ``amax`` lie now.

        They are no views: those share one version counter, and a graph that saves one row for its backward pass would
        refuse to run once another graph has written to another row.
        """
        for index, row in enumerate(self._rows):
            for tensor, whole in zip(row, (self.scale, self.amax)):
                tensor.data = whole.new_empty(0).set_(whole.untyped_storage(), index, (), ())

    def slot(self, row: int) -> Slot:
        """What a module sees of one row."""
        return Slot(self, row, *self._rows[row])

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxHistory:
        """Rows of the same names that start empty: a copy that is only evaluated would keep its scales for ever."""
        return AmaxHistory(list(zip(self.names, self.roles)), self.scale.device)

    def __getstate__(self) -> dict[str, Any]:  # pickles are nobody's yet
        return {name: value for name, value in self.__dict__.items() if name not in ("owners", "after_step", "_rows")}

    @_not_for_inference
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.steps, self.stepped, self.trained_in_eval, self.unobserved = -1, False, False, 0
        self._register()

    @_not_for_inference
    def to(self, device: torch.device) -> AmaxHistory:
        """Move to ``device`` in place."""
        if self.scale.device != device:
            self.amax = self.amax.to(device)
            self.amax_history = self.amax_history.to(device)
            self.scale = self.scale.to(device)
            self._place_rows()
            self.counts = self.counts.to(device)
        return self

    def follow(self, recipe: DelayedScaling) -> None:
        """Amaxes are observed under ``recipe`` from now on; scales of which nobody knows better are taken for its."""
        if self.span is None:
            self.span = span_of(recipe)
        self.recipe = recipe

    def is_stepped_by(self, parameters: Collection[int]) -> bool:
        """Whether a parameter of an owner is among these, told by ``id``."""
        return any(id(parameter) in parameters for owner in self.owners for parameter in owner.parameters())

    def wait(self) -> None:
        """Count a training forward that no update came before, and say so once when there are too many."""
        self.waited += 1
        if self.stepped or not 0 < self.patience <= self.waited:  # a step may have any number of micro-batches
            return
        if any(owner.training for owner in self.owners):
            self.patience = -1  # told
            warnings.warn(
                f"the FP8 scales stand still: {self.waited} training forwards since update {self.updates}, and no "
                "torch.optim.Optimizer that holds parameters of the model has stepped. Step them with one, or call "
                "update_scales() of the plugin after each step, or take a recipe without state, recipe='tensorwise'",
                stacklevel=2,
            )

    def _watch_mode(self) -> None:
        """Say once that updates find nothing because the model trains in eval mode."""
        if self.unobserved < 0:
            return
        trained, self.trained_in_eval = self.trained_in_eval, False
        # Each forward that is observed sets the recipe; gradients without an optimizer are no training.
        self.unobserved = self.unobserved + 1 if trained and self.stepped and self.recipe is None else 0
        if self.unobserved >= UNOBSERVED:
            self.unobserved = -1  # told
            warnings.warn(
                f"the FP8 layers train in eval mode, in which delayed scaling observes nothing: their scales did not "
                f"follow for {UNOBSERVED} updates. Call model.train(), or take a recipe without state, "
                "recipe='tensorwise'",
                stacklevel=2,
            )

    def update(self, recipe: DelayedScaling, group: dist.ProcessGroup | None = None) -> None:
        """Reduce ``amax`` over ``group``, push it into the history and compute new scales; once per optimizer step.

        Args:
            recipe: the margin, interval, history length and algorithm.
            group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
        """
        update_together([self], recipe, group)

    @_not_for_inference
    def resize(self, length: int) -> None:
        """Give the history ``length`` rows: the oldest are dropped, or zeros are put before them."""
        if self.amax_history.shape[0] != length:
            amax_history = self.amax_history.new_zeros(length, len(self.names))
            kept = min(length, self.amax_history.shape[0])
            if kept:
                amax_history[length - kept :] = self.amax_history[self.amax_history.shape[0] - kept :]
            self.amax_history = amax_history

    def _advance(self, recipe: DelayedScaling) -> None:
        self.resize(recipe.amax_history_len)
        self.updates, self.steps, self.waited = self.updates + 1, min(self.steps, 0), 0
        self._watch_mode()
        self._make_for(span_of(recipe))
        self.recipe, kept = None, None
        if recipe.interval > 1:
            kept = self.scale.clone()
            self.counts += self.amax != 0  # an update that did not see a row brings it no nearer to its next scale
        ops.update_scales(
            self.amax,
            self.amax_history,
            self.scale,
            self._fp8_max(recipe),
            recipe.margin,
            recipe.amax_compute_algo,
            recompute=True,
        )
        if kept is not None:
            self.scale.copy_(torch.where(self.counts % recipe.interval == 0, self.scale, kept))
        self.scaled.follow(self.scale)

    def _make_for(self, span: Span) -> None:
        """An update keeps some scales: they become what they would be, made for ``span``."""
        ratios = {role: span_ratio(self.span, span, role) for role in dict.fromkeys(self.roles)}
        if any(ratio != 1 for ratio in ratios.values()):
            self.scale *= self.scale.new_tensor([ratios[role] for role in self.roles])
            self.scale.clamp_(max=FLOAT32_MAX)
        self.span = span

    def _fp8_max(self, recipe: DelayedScaling) -> Tensor:
        """The largest value of each row's format; made once for a recipe and a device: a step copies nothing."""
        key = recipe.fp8_format, self.scale.device
        if self._largest is None or self._largest[0] != key:
            values = [recipe.cast(role).float8.max for role in self.roles]
            self._largest = key, torch.tensor(values, dtype=torch.float32, device=self.scale.device)
        return self._largest[1]

    def set_row(self, row: int, scale: float, amax_history: Tensor) -> None:
        """Give one row its scale and its amaxes ``amax_history [len]``, oldest first; the other rows keep theirs."""
        self.resize(max(len(amax_history), len(self.amax_history)))
        self.scaled = HostCopy()
        self.scale[row], self.amax[row], self.counts[row] = scale, 0.0, 0.0
        self.amax_history[:, row] = 0.0
        self.amax_history[len(self.amax_history) - len(amax_history) :, row] = amax_history.to(self.amax_history.device)

    def state_dict(self) -> dict[str, Any]:
        """The state as float32 tensors, numbers and names: loads with ``weights_only=True``."""
        return {
            "names": list(self.names),
            "scale": self.scale.clone(),
            "amax_history": self.amax_history.clone(),
            "updates": self.updates,
            "seen": self.amax.clone(),
            "counts": self.counts.clone(),
            "steps": self.steps,
            **saved_span(self.span),
        }

    @_not_for_inference
    def load_state_dict(self, state: dict[str, Any], names: Sequence[str] | None = None) -> list[str]:
        """Take the rows that both know by name; the others start empty.

        Args:
            state: what :meth:`state_dict` gave.
            names: what ``state`` calls this history's rows; ``None`` is :attr:`names`.

        Returns:
            The names of this history's rows that ``state`` does not hold.

        Raises:
            ValueError: ``state`` is malformed; nothing was changed.
        """
        saved_names, scale, amax_history, updates = validated_state(state)
        names = self.names if names is None else names
        column = {name: index for index, name in enumerate(saved_names)}
        known = [(row, column[name]) for row, name in enumerate(names) if name in column]
        new_scale = torch.zeros_like(self.scale)
        new_history = self.amax_history.new_zeros(amax_history.shape[0], len(self.names))
        if known:
            rows, columns = (torch.tensor(index, device=self.scale.device) for index in zip(*known))
            new_scale[rows] = scale.to(self.scale.device)[columns]
            new_history[:, rows] = amax_history.to(self.scale.device)[:, columns]
        self.scale.copy_(new_scale)
        self.amax_history, self.updates, self.span = new_history, updates, span_in(state)
        self.scaled = HostCopy()
        self.amax.zero_()
        self.counts.zero_()
        if known:  # files of others hold neither
            self.amax[rows] = state["seen"].to(self.scale.device)[columns] if "seen" in state else 0.0
            self.counts[rows] = state["counts"].to(self.scale.device)[columns] if "counts" in state else float(updates)
        self.steps, self.waited = state.get("steps", -1), 0
        return [name for name in names if name not in column]


@dataclass(eq=False)
class Slot:
    """One row of an :class:`AmaxHistory`, as a module sees it.

    No tuple: what is compiled for one module would be for its row alone, and again for every other's.

    Attributes:
        history: what the row is of.
        row: which.
        scale: float32 ``[]``; read by value, it changes at the next update.
        amax: float32 ``[]`` that a cast writes its amax into.
    """

    history: AmaxHistory
    row: int
    scale: Tensor
    amax: Tensor

    def __reduce__(self) -> Any:
        return AmaxHistory.slot, (self.history, self.row)  # copies and pickles share what their history has

    @property
    def name(self) -> str:
        return self.history.names[self.row]

    def scale_for(self, span: Span) -> Tensor:
        """The scale; where it was made for another format or margin than ``span``'s, what it would be for that."""
        if self.history.span is None or self.history.span == span:
            return self.scale
        ratio = span_ratio(self.history.span, span, self.history.roles[self.row])
        return self.scale if ratio == 1 else (self.scale * ratio).clamp(max=FLOAT32_MAX)

    def may_be_0(self) -> bool:
        """Whether the scale may be 0, as far as the host knows without waiting for a card."""
        return torch.compiler.is_compiling() or not self.history.scaled.knows(self.row)


def update_together(
    histories: Sequence[AmaxHistory], recipe: DelayedScaling, group: dist.ProcessGroup | None = None
) -> None:
    """Update several histories with one collective: the element-wise maximum of all their amaxes."""
    if not histories:
        return
    if recipe.reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        amaxes = torch.cat([history.amax for history in histories])
        # A collective's maximum may drop a NaN, and ranks must agree; inf keeps the old scale just as well.
        torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for history, amax in zip(histories, amaxes.split([len(history.names) for history in histories])):
            history.amax.copy_(amax)
    for history in histories:
        history._advance(recipe)


def any_living() -> bool:
    """Whether there is a history, without which nothing runs in FP8."""
    return len(_living) > 0


def living() -> list[AmaxHistory]:
    """Every history, in the order they were made: ranks must agree."""
    return sorted(_living, key=lambda history: history.serial)


def _collect_the_gone(group: dist.ProcessGroup | None) -> None:
    """Once for each new model, so that no rank updates together with another's a history that waits for its collector.

    Models in reference cycles, as with a Trainer's, live until then; a new one is made on all ranks alike.
    """
    global _newest
    newest = max((history.serial for history in _living), default=-1)
    if newest > _newest:
        _newest = newest
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            gc.collect()


def update_living(recipe: DelayedScaling, group: dist.ProcessGroup | None = None, calibrated: bool = False) -> None:
    """Update the histories that no plugin looks after, where their optimizer has stepped or none is known yet.

    After calibration (``calibrated``) no optimizer is waited for.
    """
    due: dict[DelayedScaling, list[AmaxHistory]] = {}
    _collect_the_gone(group)
    for history in living():
        if history.after_step is None and (history.steps or calibrated):
            due.setdefault(history.recipe or recipe, []).append(history)  # another model's, by its own recipe
        elif history.after_step is None:
            history.wait()
    for own, histories in due.items():
        update_together(histories, own, group)
