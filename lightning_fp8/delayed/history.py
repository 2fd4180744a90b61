"""AmaxHistory: the state of delayed scaling, and the only one that changes between steps.

One :class:`AmaxHistory` serves a whole model, as one ``GradScaler`` does. It holds names, never modules; a module
holds a :class:`Slot` for each of its roles: the entry of one tensor in every buffer of the history. Between updates
scales are constant and observing is ``amax = max(amax, max |x|)``, so a recomputed forward, a micro-batch, a second
call of a shared layer and another rank fold in by the same operation, in any order.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.delayed import instances
from lightning_fp8.delayed.host_knowledge import NonzeroScales, compared_marks, new_mark
from lightning_fp8.delayed.saved import saved_steps, steps_in, validated_state
from lightning_fp8.delayed.slot import Slot
from lightning_fp8.delayed.spans import Span, saved_span, span_in, span_of
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import Role

PATIENCE = 1000
"""Training forwards without any optimizer step, or steps without an update, after which a warning says so; more than
steps have micro-batches."""

_not_for_inference = torch.inference_mode(False)
"""Decorates what makes state: tensors made under ``inference_mode`` could not be changed in place outside it."""


class AmaxHistory:
    """Amaxes and scales of tensors by name, one slot for each.

    Attributes:
        names: one name per slot, ``layers.0.fc1.input``; n slots.
        roles: one role per slot; decides the tensor's format.
        amax: float32 ``[n]``, the largest \\|x\\| since the last update.
        amax_history: float32 ``[len, n]``, amaxes of earlier steps, oldest first. An update reduces ``len`` steps, the
            newest among them, and then clears the oldest: between updates the first step is 0.
        scale: float32 ``[n]``; 0, which casts the tensor by its own amax, until it is computed for the first time: at
            the tensor's first usable amax, with an ``interval`` of n at the n-th.
        updates: how many updates there were.
        num_observed: float32 ``[n]``, in how many updates a tensor had a usable amax; what ``interval`` counts.
        steps: optimizer steps since the last update; ``None`` where no optimizer that owns the weights has stepped yet.
        stepped: whether an optimizer that owns the weights has ever stepped, in this process.
        forwards_since_update: training forwards since the last update, as far as somebody counts them.
        trained_in_eval: whether since the last update weights had gradients taken in eval mode.
        unobserved_updates: updates in a row that found nothing because of it.
        is_eval_told, is_standstill_told: whether a warning said so, and that no optimizer steps or nobody updates.
        owners: by ``id`` the modules whose parameters tell an optimizer that steps these amaxes; any does where they
            have none.
        recipe: the recipe that the amaxes since the last update were observed under; ``None`` where the host does not
            know.
        observing_threads: the identifiers of the threads that observe amaxes; none where only compiled code does.
        fp8_max: float32 ``[n]``, the largest value of each slot's format, behind what it was made for; so that a step
            copies nothing to the GPU.
        span: the format and margin that the scales were made for; ``None`` where none was made or nobody knows.
        creation_index: orders the histories of a process alike on all ranks.
        has_unequal_readers: whether layers that read one tensor did not share its cast, since their slots were unequal.
        after_step: called as soon as an optimizer has stepped, to update the scales; ``None`` leaves it to the next
            training region.

    ``amax`` and ``scale`` are changed in place only: the tensors of :class:`Slot` lie in them.
    """

    creation_index: int
    fp8_max: tuple[Any, Tensor] | None = None
    after_step: Callable[[], None] | None = None
    patience = PATIENCE
    stepped = trained_in_eval = False
    unobserved_updates = 0
    is_eval_told = is_standstill_told = False
    recipe: DelayedScaling | None = None
    observing_threads: frozenset[int] = frozenset()
    span: Span | None = None
    has_unequal_readers = False
    _marks: list[int] | None = None

    @_not_for_inference
    def __init__(self, names_and_roles: Sequence[tuple[str, Role]], device: torch.device | str = "cpu") -> None:
        self.names = [name for name, _ in names_and_roles]
        self.roles = [role for _, role in names_and_roles]
        self.amax = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(0, len(self.names), dtype=torch.float32, device=device)
        self.scale = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self.num_observed = torch.zeros(len(self.names), dtype=torch.float32, device=device)
        self.updates = 0
        self.steps: int | None = None
        self.forwards_since_update = 0
        self.nonzero_scales = NonzeroScales()
        self._register()

    def _register(self) -> None:
        self.owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._slot_tensors = [(self.scale.new_empty(0), self.amax.new_empty(0)) for _ in self.names]
        self._place_slots()
        instances.register(self)  # last: other threads see it from now on

    def _place_slots(self) -> None:
        """Put the tensors of every slot where ``scale`` and ``amax`` lie now.

        They are no views: those share one version counter, and a graph that saves one slot for its backward pass would
        refuse to run once another graph has written to another slot.
        """
        for index, tensors in enumerate(self._slot_tensors):
            for tensor, whole in zip(tensors, (self.scale, self.amax)):
                tensor.data = whole.new_empty(0).set_(whole.untyped_storage(), index, (), ())

    def slot(self, index: int) -> Slot:
        """The scale and amax of one tensor, as a module sees them."""
        return Slot(self, index, *self._slot_tensors[index])

    def marks(self) -> list[int]:
        """One mark for each slot; slots of equal marks are equal, to the bit. Who feeds one alone gives it a new one.

        The first call, and the first after values came from elsewhere, compares them and waits for a GPU.
        """
        if self._marks is None:
            current = torch.stack([self.scale, self.amax, self.num_observed])
            self._marks = compared_marks(torch.cat([current, self.amax_history]))
        return self._marks

    def note_fed_alone(self, index: int) -> None:
        """Note that a tensor feeds this slot and no other; where no marks are known yet, their comparison will tell."""
        if self._marks is not None:
            self._marks[index] = new_mark()

    def forget_marks(self) -> None:
        """Note that slots have other values than the host knows of."""
        self._marks = None
        self.has_unequal_readers = False

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxHistory:
        """Slots of the same names that start empty: a copy that is only evaluated would keep its scales for ever.

        A model that is copied with its layers owns the copy, too; layers say so themselves.
        """
        copied = AmaxHistory(list(zip(self.names, self.roles)), self.scale.device)
        for owner in instances.living(self.owners):
            if id(owner) in memo:
                copied.add_owner(memo[id(owner)])
        return copied

    def __getstate__(self) -> dict[str, Any]:  # pickles are nobody's yet
        without = ("owners", "after_step", "_slot_tensors", "_marks", "observing_threads")
        return {name: value for name, value in self.__dict__.items() if name not in without}

    @_not_for_inference
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.steps = None
        self.stepped = False
        self.trained_in_eval = False
        self.unobserved_updates = self.forwards_since_update = 0
        self.is_eval_told = self.is_standstill_told = False
        self._register()

    @_not_for_inference
    def to(self, device: torch.device) -> AmaxHistory:
        """Move to ``device`` in place."""
        if self.scale.device != device:
            self.amax = self.amax.to(device)
            self.amax_history = self.amax_history.to(device)
            self.scale = self.scale.to(device)
            self._place_slots()
            self.num_observed = self.num_observed.to(device)
        return self

    def follow(self, recipe: DelayedScaling) -> None:
        """Note that amaxes are observed under ``recipe`` from now on; scales of unknown origin are taken for its."""
        if self.span is None:
            self.span = span_of(recipe)
        self.recipe = recipe
        self.note_thread()

    def note_thread(self) -> None:
        """Note that this thread observes amaxes."""
        self.observing_threads |= {threading.get_ident()}

    def add_owner(self, module: Any) -> None:
        """Let an optimizer of parameters of ``module`` step these amaxes."""
        self.owners[id(module)] = module

    def is_stepped_by(self, parameters: Collection[int]) -> bool:
        """Whether a parameter of an owner is among these, compared by ``id``.

        Owners without any parameter, as attention has none, follow every optimizer.
        """
        own = [id(parameter) for owner in instances.living(self.owners) for parameter in owner.parameters()]
        return any(each in parameters for each in own) or (not own and len(self.owners) > 0)

    def wait(self) -> None:
        """Count a training forward since the last update, and warn once when there are too many."""
        self.forwards_since_update += 1
        # Once an optimizer has stepped, a step may have any number of micro-batches.
        if self.stepped or self.is_standstill_told or self.forwards_since_update < self.patience:
            return
        if any(owner.training for owner in instances.living(self.owners)):
            self.is_standstill_told = True
            warnings.warn(
                f"the FP8 scales stand still: {self.forwards_since_update} training forwards since update "
                f"{self.updates}, and no torch.optim.Optimizer that holds parameters of the model has stepped. Step "
                "them with one, or call update_scales() of the plugin after each step, or take a recipe without state, "
                "recipe='tensorwise'",
                stacklevel=2,
            )

    def count_step(self) -> None:
        """Count an optimizer step since the last update, and warn once when there are too many and nobody updates."""
        self.steps = (self.steps or 0) + 1
        self.stepped = True
        # Who enters no region either, as attention that follows every optimizer, observes nothing that waits.
        if self.is_standstill_told or self.steps < self.patience or self.after_step or self.recipe is None:
            return
        self.is_standstill_told = True
        warnings.warn(
            f"the FP8 scales stand still: {self.steps} optimizer steps since update {self.updates}. They are updated "
            "where an outermost fp8_autocast begins with gradients enabled: enter it anew for each step, or take a "
            "recipe without state, fp8_recipe='tensorwise'",
            stacklevel=2,
        )

    @_not_for_inference
    def resize(self, length: int) -> None:
        """Give the history ``length`` steps: the oldest are dropped, or zeros are put before them."""
        if self.amax_history.shape[0] != length:
            amax_history = self.amax_history.new_zeros(length, len(self.names))
            num_kept = min(length, self.amax_history.shape[0])
            if num_kept:
                amax_history[length - num_kept :] = self.amax_history[self.amax_history.shape[0] - num_kept :]
            self.amax_history = amax_history

    def set_slot(self, index: int, scale: float, amax_history: Tensor) -> None:
        """Give one slot its scale and its amaxes ``amax_history [len]``, oldest first; the others keep theirs."""
        self.resize(max(len(amax_history), len(self.amax_history)))
        self.forget_marks()
        self.nonzero_scales = NonzeroScales()
        self.scale[index] = scale
        self.amax[index] = 0.0
        self.num_observed[index] = 0.0
        self.amax_history[:, index] = 0.0
        self.amax_history[len(self.amax_history) - len(amax_history) :, index] = amax_history.to(
            self.amax_history.device
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as float32 tensors, numbers and names: loads with ``weights_only=True``."""
        # The keys of amax and num_observed are those of files that were saved before these had their names.
        return {
            "names": list(self.names),
            "scale": self.scale.clone(),
            "amax_history": self.amax_history.clone(),
            "updates": self.updates,
            "seen": self.amax.clone(),
            "counts": self.num_observed.clone(),
            **saved_steps(self.steps),
            **saved_span(self.span),
        }

    @_not_for_inference
    def load_state_dict(self, state: dict[str, Any], names: Sequence[str] | None = None) -> list[str]:
        """Take the slots that both know by name; the others start empty.

        Args:
            state: what :meth:`state_dict` gave.
            names: what ``state`` calls this history's slots; ``None`` is :attr:`names`.

        Returns:
            The names of this history's slots that ``state`` does not hold.

        Raises:
            ValueError: ``state`` is malformed; nothing was changed.
        """
        saved_names, scale, amax_history, updates = validated_state(state)
        names = self.names if names is None else names
        saved_index = {name: index for index, name in enumerate(saved_names)}
        known = [(index, saved_index[name]) for index, name in enumerate(names) if name in saved_index]
        new_scale = torch.zeros_like(self.scale)
        new_history = self.amax_history.new_zeros(amax_history.shape[0], len(self.names))
        if known:
            own_slots, saved_slots = (torch.tensor(indices, device=self.scale.device) for indices in zip(*known))
            new_scale[own_slots] = scale.to(self.scale.device)[saved_slots]
            new_history[:, own_slots] = amax_history.to(self.scale.device)[:, saved_slots]
        self.scale.copy_(new_scale)
        self.amax_history = new_history
        self.updates = updates
        self.span = span_in(state)
        self.forget_marks()
        self.nonzero_scales = NonzeroScales()
        self.amax.zero_()
        self.num_observed.zero_()
        if known:  # files of others hold neither
            self.amax[own_slots] = state["seen"].to(self.scale.device)[saved_slots] if "seen" in state else 0.0
            self.num_observed[own_slots] = (
                state["counts"].to(self.scale.device)[saved_slots] if "counts" in state else float(updates)
            )
        self.steps = steps_in(state)
        self.forwards_since_update = 0
        return [name for name in names if name not in saved_index]
