"""AmaxHistory: the state of delayed scaling, and the only one that changes between steps.

One :class:`AmaxHistory` serves a whole model, as one ``GradScaler`` does. It holds names, never modules; a module
holds a :class:`Slot` for each of its roles: the entry of one tensor in every buffer of the history. Between updates
scales are constant and observing is ``amax = max(amax, max |x|)``, so a recomputed forward, a micro-batch, a second
call of a shared layer and another rank fold in by the same operation, in any order.

Scales depend on a format and a margin, the *span* of a recipe: the scales of two recipes for one amax differ by a
factor, the ratio of their spans.
"""

from __future__ import annotations

import itertools
import os
import reprlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_fp8.delayed.watch import Watch
from lightning_fp8.formats import Format
from lightning_fp8.recipes import DelayedScaling, Recipe, float8_for
from lightning_fp8.scaled import Role
from lightning_fp8.scaling import FLOAT32_MAX, rescaling

T = TypeVar("T")

Span = tuple[Format, int]
"""A recipe's format and margin, which with an amax give a scale."""

_not_for_inference = torch.inference_mode(False)
"""Decorates what makes state: tensors made under ``inference_mode`` could not be changed in place outside it."""

# --- Every history of this process ------------------------------------------------------------------------------------

_instances: weakref.WeakValueDictionary[int, AmaxHistory] = weakref.WeakValueDictionary()
"""By creation index."""
_creation_indices = itertools.count()
_versions = itertools.count(1)
_version = 0


def version_of_modules() -> int:
    """A number that changes with every new history, and with the modules or the device of one."""
    return _version


def _modules_changed() -> None:
    global _version
    _version = next(_versions)


def living(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The values that are still in use: a copy, since another thread may add to them while they are iterated."""
    return [instance for reference in objects.valuerefs() if (instance := reference()) is not None]


def any_history() -> bool:
    """Whether a history exists; without one nothing runs in FP8."""
    return len(_instances) > 0


def all_histories() -> list[AmaxHistory]:
    """Every history in creation order, which all ranks share."""
    return sorted(living(_instances), key=lambda history: history.creation_index)


# --- Spans ------------------------------------------------------------------------------------------------------------


def span_of(recipe: DelayedScaling) -> Span:
    """The span of the scales that ``recipe`` makes."""
    return recipe.fp8_format, recipe.margin


def span_ratio(before: Span | None, after: Span, role: Role) -> float:
    """The factor from a scale of ``role`` made for ``before`` to one for ``after``; 1 where ``before`` is unknown."""
    if before is None or before == after:
        return 1.0
    fp8_maxes = float8_for(before[0], role).max, float8_for(after[0], role).max
    return rescaling(fp8_maxes, (before[1], after[1]))


def saved_span(span: Span | None) -> dict[str, Any]:
    """The entries of a saved state that hold ``span``; none where it is unknown."""
    return {} if span is None else {"fp8_format": span[0].name, "margin": span[1]}


def span_in(state: dict[str, Any]) -> Span | None:
    """The span that the scales of a saved state were made for; ``None`` in older files, which do not say.

    Raises:
        ValueError: it is no format and margin of delayed scaling.
    """
    name = state.get("fp8_format")
    margin = state.get("margin")
    if name is None and margin is None:
        return None
    if not isinstance(name, str) or name not in Format.__members__:
        raise ValueError(f"FP8 state's 'fp8_format' must be the name of a format where it is there, not {name!r}")
    try:
        return span_of(DelayedScaling(fp8_format=Format[name], margin=margin))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"FP8 state's 'fp8_format' and 'margin' do not fit: {error}") from None


# --- Slots ------------------------------------------------------------------------------------------------------------


class NonzeroScales:
    """An asynchronous host mirror of ``scale > 0``: it never waits for the GPU, and learns an answer a step later.

    A scale that is not 0 stays so until other scales are loaded.
    """

    def __init__(self) -> None:
        self._nonzero: list[bool] = []
        self._pending_copy: tuple[Tensor, torch.cuda.Event] | None = None

    def is_nonzero(self, index: int) -> bool:
        """Whether the scale of the slot ``index`` is known not to be 0."""
        return index < len(self._nonzero) and self._nonzero[index]

    def read(self, scale: Tensor) -> None:
        """Read ``scale > 0`` of float32 ``[n]`` at once; waits for the GPU."""
        if not scale.is_meta:
            self._nonzero = (scale > 0).tolist()
            self._pending_copy = None

    def poll(self, scale: Tensor) -> None:
        """Read ``scale > 0`` after an update of ``scale``, float32 ``[n]``.

        On the CPU the answer is there at once. On a GPU one call starts a copy to the host, and the first call that
        finds it finished takes it.
        """
        if self._nonzero and all(self._nonzero):
            return
        if not scale.is_cuda:
            self._nonzero = (scale > 0).tolist()
        elif torch.cuda.is_current_stream_capturing():
            return
        elif self._pending_copy is None:
            copy = torch.empty(scale.shape, dtype=torch.bool, pin_memory=True)
            copy.copy_(scale > 0, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending_copy = copy, event
        elif self._pending_copy[1].query():
            self._nonzero = self._pending_copy[0].tolist()
            self._pending_copy = None

    def __reduce__(self) -> tuple[type[NonzeroScales], tuple[()]]:
        return NonzeroScales, ()  # copies and pickles start without knowledge


class Sample(NamedTuple):
    """Where the casts of one tensor are counted while a monitor samples them; see :mod:`lightning_fp8.ops.sample`.

    Attributes:
        counts: float64 ``[8]``, of ``sample_cast``.
        losses: float64 ``[4, 4]``, of ``sample_recipes``; None where that is not asked for.
        exponents: float64 ``[256]``, likewise.
    """

    counts: Tensor
    losses: Tensor | None = None
    exponents: Tensor | None = None


@dataclass(eq=False)
class Slot:
    """The entry of one tensor in each buffer of an :class:`AmaxHistory`, as a module sees it.

    It is no tuple: torch.compile would specialize a module's code on its index, and compile it again for every
    other module.

    Attributes:
        history: the history that the slot belongs to.
        index: where it is in the history's buffers, whose last dimension counts slots.
        scale: float32 ``[]``; read by value, it changes at the next update.
        amax: float32 ``[]`` that a cast writes its amax into.
        readers: the layers that read one cast of this slot's module together, as far as known; 0 before the second.
        readers_of_last: those that have read the last one.
        sample: where its casts are counted; None while no monitor samples them.
    """

    history: AmaxHistory
    index: int
    scale: Tensor
    amax: Tensor
    readers: int = 0
    readers_of_last: int = 0
    sample: Sample | None = None

    def __reduce__(self) -> Any:
        return _slot_of, (self.history, self.index)  # copies and pickles share what their history has

    @property
    def name(self) -> str:
        return self.history.names[self.index]

    def scale_for(self, span: Span) -> Tensor:
        """The scale; where it was made for another format or margin than ``span``'s, what it would be for that."""
        if self.history.span is None or self.history.span == span:
            return self.scale
        ratio = span_ratio(self.history.span, span, self.history.roles[self.index])
        return self.scale if ratio == 1 else (self.scale * ratio).clamp(max=FLOAT32_MAX)

    def scale_is_nonzero(self) -> bool:
        """Whether the host knows, without waiting for the GPU, that the scale is not 0."""
        if torch.compiler.is_dynamo_compiling():  # and not torch.export's default, which runs Python code
            return False  # what the host learns later must not compile anew
        return self.history.nonzero_scales.is_nonzero(self.index)


def _slot_of(history: AmaxHistory, index: int) -> Slot:
    return history.slot(index)


# --- The state --------------------------------------------------------------------------------------------------------


class AmaxHistory:
    """Amaxes and scales of tensors by name, one slot for each.

    Attributes:
        names: one name per slot, ``layers.0.fc1.input``; n slots.
        roles: one role per slot; decides the tensor's format.
        amax: float32 ``[n]``, the largest \\|x\\| since the slot's last update.
        amax_history: float32 ``[len, n]``, amaxes of earlier steps, oldest first. An update reduces ``len`` steps, the
            newest among them, and then clears the oldest: between updates the first step is 0.
        scale: float32 ``[n]``; 0, which casts the tensor by its own amax, until it is computed for the first time: at
            the tensor's first usable amax, with an ``interval`` of n at the n-th.
        updates: how many updates there were, of any of the slots.
        num_observed: float32 ``[n]``, in how many updates a tensor had a usable amax; what ``interval`` counts.
        steps: ``None`` before the first step of an optimizer that owns slots, then 0; positive while a step's amaxes
            still wait for their update, as in states that earlier versions saved: the next training forward updates.
        span: the format and margin that the scales were made for; ``None`` where none was made or nobody knows.
        recipe: the recipe that amaxes were last observed under; ``None`` where the host does not know.
        plugin_recipe: the recipe of the plugin that trains the model; ``None`` where regions of ``fp8_autocast`` say.
        calibrated: whether a calibrating region has observed amaxes and has not ended yet.
        modules: by ``id`` the modules that decide which optimizers own the slots: those that read them, and the root of
            the converted model. Weak references.
        slots_of: by ``id`` of a module the indices of its slots; none of a root.
        watch: what only warnings need.
        nonzero_scales: what the host knows of ``scale > 0``.
        fp8_max: float32 ``[n]``, the largest value of each slot's format, after the format and device that it was made
            for: a step copies nothing to the GPU.
        before_update: called with the history before each update, while its amaxes and scales are those of the step.
        creation_index: orders the histories of a process alike on all ranks.

    ``amax`` and ``scale`` are changed in place only: the tensors of :class:`Slot` share their memory.
    """

    creation_index: int
    fp8_max: tuple[Any, Tensor] | None = None
    recipe: DelayedScaling | None = None
    plugin_recipe: Recipe | None = None
    calibrated = False
    span: Span | None = None
    before_update: Callable[[AmaxHistory], None] | None = None

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
        self.nonzero_scales = NonzeroScales()
        self.watch = Watch()
        self._register()

    def _register(self) -> None:
        self.modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.slots_of: dict[int, tuple[int, ...]] = {}
        self._slot_tensors = [(self.scale.new_empty(0), self.amax.new_empty(0)) for _ in self.names]
        self._place_slots()
        self.creation_index = next(_creation_indices)
        _instances[self.creation_index] = self
        _modules_changed()

    def _place_slots(self) -> None:
        """Point the tensors of every slot at ``scale`` and ``amax``.

        They are no views: those share one version counter, and a graph that saves one slot for its backward pass would
        refuse to run once another graph has written to another slot.
        """
        for index, tensors in enumerate(self._slot_tensors):
            for tensor, whole in zip(tensors, (self.scale, self.amax)):
                tensor.data = whole.new_empty(0).set_(whole.untyped_storage(), index, (), ())

    def slot(self, index: int) -> Slot:
        """The scale and amax of one tensor, as a module sees them."""
        return Slot(self, index, *self._slot_tensors[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxHistory:
        """Slots of the same names that start empty: a copy that is only evaluated would keep its scales for ever.

        A copied root decides for the copy, too; copied layers add themselves.
        """
        copied = AmaxHistory(list(zip(self.names, self.roles)), self.scale.device)
        for module in living(self.modules):
            if id(module) in memo:
                copied.add_module(memo[id(module)], self.slots_of[id(module)])
        return copied

    def __getstate__(self) -> dict[str, Any]:  # no module or plugin uses a pickle yet
        without = ("modules", "slots_of", "plugin_recipe", "calibrated", "before_update", "_slot_tensors")
        return {name: value for name, value in self.__dict__.items() if name not in without}

    @_not_for_inference
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.steps = None
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
            _modules_changed()
        return self

    def follow(self, recipe: DelayedScaling) -> None:
        """Note that amaxes are observed under ``recipe`` from now on; scales of unknown origin are taken for its."""
        if self.span is None:
            self.span = span_of(recipe)
        self.recipe = recipe
        self.watch.observed = True

    def add_module(self, module: Any, slots: Sequence[int] = ()) -> None:
        """Let the optimizers of ``module`` own its ``slots``; without any it is the root of a converted model."""
        self.modules[id(module)] = module
        self.slots_of[id(module)] = tuple(slots)
        _modules_changed()

    def training_forward_begins(self, *, observes: bool = False) -> None:
        """Count for the warnings; see :meth:`Watch.forward_begins`."""
        training = any(module.training for module in living(self.modules))
        self.watch.forward_begins(self.updates, training, observes=observes)

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
            "version": STATE_VERSION,
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
        self.nonzero_scales = NonzeroScales()
        self.amax.zero_()
        self.num_observed.zero_()
        if known:  # files of others hold neither
            self.amax[own_slots] = state["seen"].to(self.scale.device)[saved_slots] if "seen" in state else 0.0
            self.num_observed[own_slots] = (
                state["counts"].to(self.scale.device)[saved_slots] if "counts" in state else float(updates)
            )
        self.steps = steps_in(state)
        self.watch.forwards = 0
        return [name for name in names if name not in saved_index]


# --- Saved states -----------------------------------------------------------------------------------------------------

STATE_VERSION = 1
"""The version of saved FP8 states. Those that lack the entry, as of Transformer Engine's files, are of version 1. A new
version is one that this code would read wrongly; entries that it may ignore need none."""


def validated_state(state: Any) -> tuple[list[str], Tensor, Tensor, int]:
    """The names, scales, amax history and update count of a saved state.

    Raises:
        ValueError: a key is missing or a value has the wrong type, dtype or shape; the message names it.
    """
    if not isinstance(state, dict):
        is_path = isinstance(state, (str, os.PathLike))
        way_out = "read the file first: torch.load(path)" if is_path else "save it with fp8_state_dict(model)"
        raise ValueError(f"FP8 state must be a dictionary, not {type(state).__name__}; {way_out}")
    version = state.get("version", STATE_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"FP8 state's 'version' must be a positive integer, not {reprlib.repr(version)}")
    if version > STATE_VERSION:
        raise ValueError(
            f"FP8 state's 'version' is {version}, and this lightning_fp8 reads versions up to {STATE_VERSION}: "
            "a newer lightning_fp8 saved it; upgrade, pip install -U lightning-fp8"
        )
    missing = [key for key in ("names", "scale", "amax_history", "updates") if key not in state]
    if missing:
        inside = "".join(f"[{key!r}]" for key in ("FP8Precision", "model") if key in state)
        way_out = f"Pass what is inside: state{inside}" if inside else "Save it with fp8_state_dict(model)"
        raise ValueError(f"FP8 state lacks {missing}; it holds {sorted(map(str, state))[:10]}. {way_out}")
    names = state["names"]
    scale = state["scale"]
    amax_history = state["amax_history"]
    updates = state["updates"]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("FP8 state's 'names' must be a list of strings")
    if len(set(names)) < len(names):
        raise ValueError(f"FP8 state's 'names' holds {next(n for n in names if names.count(n) > 1)!r} more than once")
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise ValueError(f"FP8 state's 'updates' must be a count, not {reprlib.repr(updates)}")
    for key, value, shape in (("scale", scale, (len(names),)), ("amax_history", amax_history, (None, len(names)))):
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise ValueError(
                f"FP8 state's {key!r} must be a float32 tensor, not {getattr(value, 'dtype', type(value))}"
            )
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"FP8 state's {key!r} must hold values, not be sparse or on meta; load it onto the CPU")
        if value.dim() != len(shape) or value.shape[-1] != shape[-1]:
            raise ValueError(f"FP8 state's {key!r} has shape {tuple(value.shape)} for {len(names)} names")
        if value.numel() and not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    steps_in(state)
    span_in(state)
    for key in ("seen", "counts"):  # amaxes that wait may be infinite or NaN: the next update passes over them
        value = state.get(key, scale)
        if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.shape != (len(names),):
            raise ValueError(f"FP8 state's {key!r} must be float32 of shape ({len(names)},) where it is there")
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"FP8 state's {key!r} must hold values, not be sparse or on meta; load it onto the CPU")
        if key == "counts" and not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    return names, scale.detach(), amax_history.detach(), updates


def saved_steps(steps: int | None) -> dict[str, int]:
    """The entry of a saved state that holds optimizer steps since the last update: -1 where no optimizer is known."""
    return {"steps": -1 if steps is None else steps}


def steps_in(state: dict[str, Any]) -> int | None:
    """What :func:`saved_steps` was given; ``None`` for states of older versions and of others, which lack it.

    Raises:
        ValueError: it is no number of steps.
    """
    steps = state.get("steps", -1)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"FP8 state's 'steps' must be a count or -1, not {reprlib.repr(steps)}")
    return None if steps < 0 else steps
