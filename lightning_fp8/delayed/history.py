"""AmaxHistory: the state of delayed scaling, and the only one that changes between steps.

A model has one :class:`AmaxHistory`, as it has one ``GradScaler``. The history holds names, and no strong references to
modules. Each module holds a :class:`Slot` for each of its roles, which is the entry of one tensor in every buffer of
the history. Between updates the scales are constant, and an observation is ``amax = max(amax, max |x|)``. Recomputed
forwards, micro-batches, repeated calls of a shared layer and ranks are all combined by this operation, in any order.

Scales depend on the format and the margin of a recipe, its *span*. For the same amax, the scales of two recipes differ
by a factor, the ratio of their spans.
"""

from __future__ import annotations

import copy
import itertools
import os
import reprlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.watch import Watch
from lightning_fp8.numerics.formats import Format
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe, float8_for
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.numerics.scaling import FLOAT32_MAX, rescaling

T = TypeVar("T")

Span = tuple[Format, int]
"""The format and margin of a recipe. With an amax they determine a scale."""

WARM_UP_STEPS = 3  # the first computes scales, the host learns of them in the second, the third runs their kernels
WARM_UP = f"run at least {WARM_UP_STEPS} training steps, with torch.cuda.synchronize() after each"

_not_for_inference = torch.inference_mode(False)
"""Decorator of functions that create state: tensors created in inference mode cannot be updated outside of it."""

# --- Every history of this process ------------------------------------------------------------------------------------

_references: list[weakref.ref[AmaxHistory]] = []
"""All histories in order of creation."""
_creation_indices = itertools.count()


def any_history() -> bool:
    """Whether a history exists. If not, nothing runs in FP8."""
    return bool(_references)


def all_histories() -> list[AmaxHistory]:
    """All histories in order of creation, which is the same on all ranks."""
    return [history for reference in tuple(_references) if (history := reference()) is not None]


def histories_of_regions() -> list[AmaxHistory]:
    """The histories without a plugin, which ``fp8_autocast`` updates."""
    found = []
    for reference in tuple(_references):
        if (history := reference()) is not None and history.plugin_recipe is None:
            found.append(history)  # not a comprehension, which is a frame before Python 3.12
    return found


def living(objects: weakref.WeakValueDictionary[int, T]) -> list[T]:
    """The values that are still referenced, as a copy, since another thread may add values during an iteration."""
    return [instance for reference in objects.valuerefs() if (instance := reference()) is not None]


# --- Spans ------------------------------------------------------------------------------------------------------------


def span_of(recipe: DelayedScaling) -> Span:
    """The span of ``recipe``."""
    return recipe.fp8_format, recipe.margin


def span_ratio(before: Span | None, after: Span, role: Role) -> float:
    """The factor that converts a scale of ``role`` from span ``before`` to ``after``; 1 if ``before`` is unknown."""
    if before is None or before == after:
        return 1.0
    fp8_maxes = float8_for(before[0], role).max, float8_for(after[0], role).max
    return rescaling(fp8_maxes, (before[1], after[1]))


def saved_span(span: Span | None) -> dict[str, Any]:
    """The entries of a saved state for ``span``; empty if it is unknown."""
    return {} if span is None else {"fp8_format": span[0].name, "margin": span[1]}


def saved_choice(history: AmaxHistory | None, part: Any = None) -> dict[str, Any]:
    """The entry of a saved state for layers that stay in high precision, once they are chosen.

    Args:
        part: the module that is saved, if it may be a part of the model.
    """
    choice = None if history is None else history.choice
    slower = None if choice is None else choice.slower(part)
    return {} if slower is None else {"slower": slower}


def span_in(state: dict[str, Any]) -> Span | None:
    """The span of the scales of a saved state; ``None`` for older files, which do not have it.

    Raises:
        ValueError: If the format or the margin is invalid for delayed scaling.
    """
    name = state.get("fp8_format")
    margin = state.get("margin")
    if name is None and margin is None:
        return None
    if not isinstance(name, str) or name not in Format.__members__:
        raise ValueError(f"FP8 state's 'fp8_format' must be the name of a format, or be missing; it is {name!r}")
    try:
        return span_of(DelayedScaling(fp8_format=Format[name], margin=margin))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"FP8 state's 'fp8_format' and 'margin' do not fit: {error}") from None


# --- Slots ------------------------------------------------------------------------------------------------------------


class NonzeroScales:
    """An asynchronous copy of ``scale > 0`` on the host. It never waits for the GPU, so it lags by a step or more.

    A scale that is nonzero stays nonzero until a state is loaded.

    Attributes:
        values: for each slot, whether the scale is known to be nonzero; empty before the first copy.
    """

    def __init__(self) -> None:
        self.values: list[bool] = []
        self._copy: Tensor | None = None

    def read(self, scale: Tensor) -> None:
        """Read ``scale > 0`` of float32 ``[n]`` synchronously. It waits for the GPU."""
        if not scale.is_meta:
            self.values = (scale > 0).tolist()

    def poll(self, scale: Tensor) -> None:
        """Read ``scale > 0`` after an update of ``scale``, float32 ``[n]``.

        On a GPU, each call reads what has arrived on the host, and starts an asynchronous copy.
        """
        if is_capturing() or (self.values and all(self.values)):
            return
        if not scale.is_cuda:
            self.values = (scale > 0).tolist()
        else:
            if self._copy is None:
                self._copy = torch.zeros(scale.shape, dtype=torch.bool, pin_memory=True)
            self.values = self._copy.tolist()  # an incomplete copy is right, too: True stays True
            self._copy.copy_(scale > 0, non_blocking=True)

    def __reduce__(self) -> tuple[type[NonzeroScales], tuple[()]]:
        return NonzeroScales, ()  # copies and pickles start with all unknown


class Sample(NamedTuple):
    """What a monitor adds up over the sampled casts of one tensor; see :mod:`lightning_fp8.ops.sample`.

    Attributes:
        counts: float64 ``[8]``, the errors of the casts, added by ``sample_cast``.
        losses: float64 ``[4, 4]``, the errors of other recipes' casts, one row per recipe, added by ``sample_recipes``;
            None if not requested.
        exponents: float64 ``[256]``, a histogram of exponents, added by ``sample_recipes``; None if not requested.
    """

    counts: Tensor
    losses: Tensor | None = None
    exponents: Tensor | None = None


@dataclass(eq=False)
class Slot:
    """The entry of one tensor in each buffer of an :class:`AmaxHistory`.

    It is not a tuple, because torch.compile would specialize a module's code on the index and compile it again for
    every other module.

    Attributes:
        history: the history that owns the slot.
        index: the index in the last dimension of the history's buffers.
        scale: float32 ``[]``. It changes in place at the next update.
        amax: float32 ``[]``, updated by casts.
        readers: the number of layers known to read one cast of this tensor; 0 until the second cast.
        readers_of_last: the number of layers that have read the last cast.
        sample: the counters of its casts; None while no monitor samples them.
    """

    history: AmaxHistory
    index: int
    scale: Tensor
    amax: Tensor
    readers: int = 0
    readers_of_last: int = 0
    sample: Sample | None = None

    def __reduce__(self) -> Any:
        return _slot_of, (self.history, self.index)  # copies and pickles refer to their history's buffers

    @property
    def name(self) -> str:
        return self.history.names[self.index]

    def scale_for(self, span: Span) -> Tensor:
        """The scale, converted to the format and margin of ``span`` if it was computed for others."""
        if self.history.span is None or self.history.span == span:
            return self.scale
        ratio = span_ratio(self.history.span, span, self.history.roles[self.index])
        return self.scale if ratio == 1 else (self.scale * ratio).clamp(max=FLOAT32_MAX)

    def scale_is_nonzero(self) -> bool:
        """Whether the scale is known to be nonzero, without waiting for the GPU."""
        if torch.compiler.is_dynamo_compiling():  # False for torch.export's default, which runs Python code
            return False  # a value that changes later would recompile
        nonzero = self.history.nonzero_scales.values
        known = self.index < len(nonzero) and nonzero[self.index]
        if not known and is_capturing():
            text = "a CUDA graph captures FP8 casts whose scales may be 0, which each replay checks. Before a capture"
            warnings.warn(f"{text}, {WARM_UP}", stacklevel=2)
        return known


def _slot_of(history: AmaxHistory, index: int) -> Slot:
    return history.slot(index)


# --- The state --------------------------------------------------------------------------------------------------------


class AmaxHistory:
    """The amaxes and scales of named tensors, one slot for each tensor.

    Attributes:
        names: the names of the n slots, for example ``layers.0.fc1.input``.
        roles: the role of each slot, which determines the tensor's format.
        amax: float32 ``[n]``, the largest \\|x\\| since the slot's last update.
        amax_history: float32 ``[len, n]``, amaxes of earlier steps, oldest first. An update reduces ``len`` steps,
            including the newest, and then clears the oldest, so row 0 is 0 between updates.
        scale: float32 ``[n]``. 0 means that there is no scale yet, and the tensor is cast by its current amax. The
            first scale is computed at the tensor's first usable amax, or at the n-th with an ``interval`` of n.
        updates: the number of updates, of any of the slots.
        num_observed: float32 ``[n]``, the number of updates in which a tensor had a usable amax; ``interval`` counts
            these.
        steps: ``None`` before the first step of an optimizer of the model, then 0. It is positive while amaxes of a
            step are not yet part of an update, as in states of earlier versions; the next training forward updates.
        span: the format and margin of the scales; ``None`` if there are no scales or it is unknown.
        recipe: the recipe of the last observed amaxes; ``None`` if it is unknown.
        plugin_recipe: the recipe of the plugin that trains the model; ``None`` if ``fp8_autocast`` sets the recipe.
        own_recipe: the recipe of layers outside every region, if that of any is delayed scaling.
        calibrated: whether a calibrating region has observed amaxes and has not ended yet.
        modules: weak references, by ``id``, to the modules whose optimizers update the scales: those that read slots,
            and the root of the converted model.
        slots_of: the indices of the slots of each module, by its ``id``; a root has none.
        watch: state that only warnings use.
        nonzero_scales: a copy of ``scale > 0`` on the host.
        fp8_max: float32 ``[n]``, the largest value of each slot's format, cached with the format and device, so that an
            update copies nothing to the GPU.
        before_update: called with the history before each update, when its amaxes and scales are those of the step.
        eager_updates: the recipe of the last updates outside a capture, and their number.
        is_captured: whether a CUDA graph uses the slots.
        choice: which layers stay in high precision because it is faster; see :mod:`lightning_fp8.convert.choice`.
        creation_index: the order of the histories of a process, which is the same on all ranks.

    ``amax`` and ``scale`` must only be changed in place, because the tensors of each :class:`Slot` share their memory.
    """

    creation_index: int
    fp8_max: tuple[Any, Tensor] | None = None
    recipe: DelayedScaling | None = None
    plugin_recipe: Recipe | None = None
    own_recipe: DelayedScaling | None = None
    calibrated = False
    span: Span | None = None
    before_update: Callable[[AmaxHistory], None] | None = None
    eager_updates: tuple[DelayedScaling | None, int] = None, 0
    is_captured = False
    choice: Any = None

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
        _references.append(weakref.ref(self, _references.remove))

    def _place_slots(self) -> None:
        """Let the tensors of every slot share the memory of ``scale`` and ``amax``.

        They are not views, because views share one version counter: a graph that saves one slot for its backward pass
        would fail after another graph has written to another slot.
        """
        for index, tensors in enumerate(self._slot_tensors):
            for tensor, whole in zip(tensors, (self.scale, self.amax)):
                tensor.data = whole.new_empty(0).set_(whole.untyped_storage(), index, (), ())

    def slot(self, index: int) -> Slot:
        """The slot ``index``."""
        return Slot(self, index, *self._slot_tensors[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxHistory:
        """A history with the same names and empty slots. A copy that is only evaluated would never update its scales.

        The copy of a root is registered here; copied layers register themselves.
        """
        copied = AmaxHistory(list(zip(self.names, self.roles)), self.scale.device)
        for module in living(self.modules):
            if id(module) in memo:
                copied.add_module(memo[id(module)], self.slots_of[id(module)])
        copied.choice = copy.deepcopy(self.choice, memo)
        copied.pin(self.own_recipe)
        return copied

    def __getstate__(self) -> dict[str, Any]:  # modules and plugins register themselves after loading
        without = ("modules", "slots_of", "plugin_recipe", "calibrated", "before_update", "choice", "_slot_tensors")
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
        return self

    def follow(self, recipe: DelayedScaling) -> None:
        """Set the recipe of the amaxes that follow. Scales of unknown span are assumed to have that of ``recipe``."""
        if self.span is None:
            self.span = span_of(recipe)
        self.recipe = recipe
        self.watch.observed = True

    def pin(self, recipe: DelayedScaling | None) -> None:
        """Set :attr:`own_recipe`, and the span before it is compiled in."""
        self.own_recipe = recipe
        if recipe is not None:
            self.span = self.span or span_of(recipe)

    def add_module(self, module: Any, slots: Sequence[int] = ()) -> None:
        """Let the optimizers of ``module`` update the scales. The root of a converted model has no ``slots``."""
        self.modules[id(module)] = module
        self.slots_of[id(module)] = tuple(slots)

    def remove_module(self, module: Any) -> None:
        """Give up the slots of ``module``, which uses another history from now on."""
        self.modules.pop(id(module), None)
        self.slots_of.pop(id(module), None)

    @property
    def in_use(self) -> bool:
        """Whether a living module uses slots, or there are none."""
        return not self.names or any(self.slots_of[id(module)] for module in living(self.modules))

    def is_training(self) -> bool:
        """Whether a module that uses the history is in training mode."""
        return any(module.training for module in living(self.modules))

    @_not_for_inference
    def resize(self, length: int) -> None:
        """Resize the history to ``length`` steps: drop the oldest steps, or prepend zeros."""
        if self.amax_history.shape[0] != length:
            self._warn_of_graphs()
            amax_history = self.amax_history.new_zeros(length, len(self.names))
            num_kept = min(length, self.amax_history.shape[0])
            if num_kept:
                amax_history[length - num_kept :] = self.amax_history[self.amax_history.shape[0] - num_kept :]
            self.amax_history = amax_history

    @_not_for_inference
    def reset(self, slots: Iterable[int] | None = None) -> None:
        """Empty ``slots``. Without them, the history is as a new one."""
        self._warn_of_graphs()
        if slots is None:
            self.updates, self.steps, self.span = 0, None, None
        self.eager_updates = None, 0
        emptied = slice(None) if slots is None else list(slots)
        for values in (self.scale, self.amax, self.num_observed, self.amax_history):
            values[..., emptied] = 0.0
        self.nonzero_scales = NonzeroScales()
        self.watch.state_changed()

    def _warn_of_graphs(self) -> None:
        if self.is_captured and self.updates:
            self.is_captured = False
            text = "FP8 scales are loaded, emptied or resized: do not replay CUDA graphs captured before"
            warnings.warn(f"{text}, {WARM_UP}, and capture again", stacklevel=3)

    def set_slot(self, index: int, scale: float, amax_history: Tensor) -> None:
        """Set the scale and the amaxes ``amax_history [len]``, oldest first, of one slot."""
        self.resize(max(len(amax_history), len(self.amax_history)))
        self.reset([index])
        self.scale[index] = scale
        self.amax_history[len(self.amax_history) - len(amax_history) :, index] = amax_history.to(
            self.amax_history.device
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as float32 tensors, numbers and names, which loads with ``weights_only=True``."""
        # The keys of amax and num_observed are older names of these attributes, which existing files have.
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
            **saved_choice(self),
        }

    @_not_for_inference
    def load_state_dict(self, state: dict[str, Any], names: Sequence[str] | None = None, part: Any = None) -> list[str]:
        """Load the slots whose names are in ``state``. All other slots start empty.

        Args:
            state: the result of :meth:`state_dict`.
            names: the names of this history's slots in ``state``; ``None`` is :attr:`names`.
            part: the module that is loaded, if it may be a part of the model.

        Returns:
            The names of this history's slots that are missing in ``state``.

        Raises:
            ValueError: If ``state`` is malformed. The history is then unchanged.
        """
        saved_names, scale, amax_history, updates = validated_state(state)
        names = self.names if names is None else names
        saved_index = {name: index for index, name in enumerate(saved_names)}
        known = [(index, saved_index[name]) for index, name in enumerate(names) if name in saved_index]
        self.reset()
        self.resize(amax_history.shape[0])
        if known:
            own_slots, saved_slots = (torch.tensor(indices, device=self.scale.device) for indices in zip(*known))
            self.scale[own_slots] = scale.to(self.scale.device)[saved_slots]
            self.amax_history[:, own_slots] = amax_history.to(self.scale.device)[:, saved_slots]
            # Files of Transformer Engine have neither.
            self.amax[own_slots] = state["seen"].to(self.scale.device)[saved_slots] if "seen" in state else 0.0
            self.num_observed[own_slots] = (
                state["counts"].to(self.scale.device)[saved_slots] if "counts" in state else float(updates)
            )
        self.updates, self.steps, self.span = updates, steps_in(state), span_in(state)
        missing = [name for name in names if name not in saved_index]
        if self.choice is not None:
            self.choice.load(state.get("slower"), part, missing)
        return missing


# --- Saved states -----------------------------------------------------------------------------------------------------

STATE_VERSION = 1
"""The version of saved FP8 states. States without the entry, such as Transformer Engine's, have version 1. The version
is increased if older code would misread a state, and not for entries that older code can ignore."""


def validated_state(state: Any) -> tuple[list[str], Tensor, Tensor, int]:
    """Validate a saved state, and return its names, scales, amax history and number of updates.

    Raises:
        ValueError: If a key is missing, or a value has the wrong type, dtype or shape. The message names the key.
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
            f"FP8 state's 'version' is {version}, but this lightning_fp8 reads versions up to {STATE_VERSION}. It was "
            "saved by a newer lightning_fp8: update this one, by git pull in its checkout"
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
    for key in ("scale", "amax_history", "seen", "counts"):
        value = state.get(key, scale)  # older states lack the last two
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise ValueError(
                f"FP8 state's {key!r} must be a float32 tensor, not {getattr(value, 'dtype', type(value))}"
            )
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"FP8 state's {key!r} must be a dense tensor that is not on meta; load it to the CPU")
        if value.dim() != 1 + (key == "amax_history") or value.shape[-1] != len(names):
            raise ValueError(f"FP8 state's {key!r} has shape {tuple(value.shape)} for {len(names)} names")
        # Pending amaxes may be infinite or NaN: an update ignores them.
        if key != "seen" and value.numel() and not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    steps_in(state)
    span_in(state)
    slower = state.get("slower", {})
    if not isinstance(slower, dict) or not all(isinstance(text, str) for pair in slower.items() for text in pair):
        raise ValueError("FP8 state's 'slower' must be the reasons of layers by their names, or be missing")
    return names, scale.detach(), amax_history.detach(), updates


def saved_steps(steps: int | None) -> dict[str, int]:
    """The entry of a saved state for the optimizer steps since the last update: -1 if no optimizer is known."""
    return {"steps": -1 if steps is None else steps}


def steps_in(state: dict[str, Any]) -> int | None:
    """The inverse of :func:`saved_steps`; ``None`` for states of older versions and of Transformer Engine.

    Raises:
        ValueError: If the entry is not a number of steps.
    """
    steps = state.get("steps", -1)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"FP8 state's 'steps' must be a count or -1, not {reprlib.repr(steps)}")
    return None if steps < 0 else steps
