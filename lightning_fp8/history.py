"""The one thing that changes between steps: amaxes, their window, and the scales of delayed scaling.

One :class:`AmaxHistory` serves a whole model, as one ``GradScaler`` does. It holds names, never modules; a module
holds a :class:`Slot` for each of its roles. Within a step scales are constant and observing is
``seen = max(seen, amax)``, so a recomputed forward, a micro-batch, a second call of a shared layer and another rank
fold in by the same operation, in any order.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fp8 import ops
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import Role

_serial = itertools.count()
_not_for_inference = torch.inference_mode(False)
"""State made while ``inference_mode`` rules has to change outside it too."""
_living: weakref.WeakSet[AmaxHistory] = weakref.WeakSet()


class AmaxHistory:
    """Amaxes and scales of the named rows.

    Attributes:
        names: one name per row, ``layers.0.fc1.input``.
        roles: one role per row; decides the row's format.
        seen: float32 ``[n]``, the largest \\|x\\| since the last update.
        window: float32 ``[len, n]``, amaxes of earlier steps, oldest first. An update looks at ``len`` of them, the
            newest among them, and then drops the oldest: between updates the first row is 0.
        scale: float32 ``[n]``; 0 until the first update, which casts the tensor by its own amax.
        updates: how many updates there were.

    ``seen`` and ``scale`` are changed in place only: the tensors of :class:`Slot` lie in them.
    """

    _largest: tuple[Any, Tensor] | None = None

    @_not_for_inference
    def __init__(self, rows: Sequence[tuple[str, Role]], device: torch.device | str = "cpu") -> None:
        self.names = [name for name, _ in rows]
        self.roles = [role for _, role in rows]
        self.seen = torch.zeros(len(rows), dtype=torch.float32, device=device)
        self.window = torch.zeros(0, len(rows), dtype=torch.float32, device=device)
        self.scale = torch.zeros(len(rows), dtype=torch.float32, device=device)
        self.updates = 0
        self.scaled = HostCopy()
        self._register()

    def _register(self) -> None:
        self.serial = next(_serial)
        _living.add(self)
        self._rows = [(self.scale.new_empty(0), self.seen.new_empty(0)) for _ in self.names]
        self._place_rows()

    def _place_rows(self) -> None:
        """Put the tensors of every row where ``scale`` and ``seen`` lie now.

        They are no views: those share one version counter, and a graph that saves one row for its backward pass would
        refuse to run once another graph has written to another row.
        """
        for index, row in enumerate(self._rows):
            for tensor, whole in zip(row, (self.scale, self.seen)):
                tensor.data = whole.new_empty(0).set_(whole.untyped_storage(), index, (), ())

    def slot(self, row: int) -> Slot:
        """What a module sees of one row."""
        return Slot(self, row, *self._rows[row])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    @_not_for_inference
    def __setstate__(self, state: dict[str, Any]) -> None:  # copies and pickles
        self.__dict__.update(state)
        self._register()

    @_not_for_inference
    def to(self, device: torch.device) -> AmaxHistory:
        """Move to ``device`` in place."""
        if self.scale.device != device:
            self.seen, self.window, self.scale = (t.to(device) for t in (self.seen, self.window, self.scale))
            self._place_rows()
        return self

    def update(self, recipe: DelayedScaling, group: dist.ProcessGroup | None = None) -> None:
        """Reduce ``seen`` over ``group``, push it into the window and compute new scales; once per optimizer step.

        Args:
            recipe: the margin, interval, window length and algorithm.
            group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
        """
        update_together([self], recipe, group)

    @_not_for_inference
    def resize(self, length: int) -> None:
        """Give the window ``length`` rows: the oldest are dropped, or zeros are put before them."""
        if self.window.shape[0] != length:
            window = self.window.new_zeros(length, len(self.names))
            kept = min(length, self.window.shape[0])
            if kept:
                window[length - kept :] = self.window[self.window.shape[0] - kept :]
            self.window = window

    def _advance(self, recipe: DelayedScaling) -> None:
        self.resize(recipe.amax_history_len)
        self.updates += 1
        ops.update_scales(
            self.seen,
            self.window,
            self.scale,
            self._fp8_max(recipe),
            recipe.margin,
            recipe.amax_compute_algo,
            recompute=self.updates % recipe.interval == 0,
        )
        self.scaled.follow(self.scale)

    def _fp8_max(self, recipe: DelayedScaling) -> Tensor:
        """The largest value of each row's format; made once for a recipe and a device: a step copies nothing."""
        key = recipe.fp8_format, self.scale.device
        if self._largest is None or self._largest[0] != key:
            values = [recipe.cast(role).float8.max for role in self.roles]
            self._largest = key, torch.tensor(values, dtype=torch.float32, device=self.scale.device)
        return self._largest[1]

    def set_row(self, row: int, scale: float, window: Tensor) -> None:
        """Give one row its scale and its amaxes ``window [len]``, oldest first; the other rows keep theirs."""
        self.resize(max(len(window), len(self.window)))
        self.scaled = HostCopy()
        self.scale[row], self.seen[row] = scale, 0.0
        self.window[:, row] = 0.0
        self.window[len(self.window) - len(window) :, row] = window.to(self.window.device)

    def state_dict(self) -> dict[str, Any]:
        """The state as float32 tensors, numbers and names: loads with ``weights_only=True``."""
        return {
            "names": list(self.names),
            "scale": self.scale.clone(),
            "amax_history": self.window.clone(),
            "updates": self.updates,
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
        saved_names, scale, window, updates = validated_state(state)
        names = self.names if names is None else names
        column = {name: index for index, name in enumerate(saved_names)}
        known = [(row, column[name]) for row, name in enumerate(names) if name in column]
        new_scale, new_window = torch.zeros_like(self.scale), self.window.new_zeros(window.shape[0], len(self.names))
        if known:
            rows, columns = (torch.tensor(index, device=self.scale.device) for index in zip(*known))
            new_scale[rows] = scale.to(self.scale.device)[columns]
            new_window[:, rows] = window.to(self.scale.device)[:, columns]
        self.scale.copy_(new_scale)
        self.window, self.updates = new_window, updates
        self.scaled = HostCopy()
        self.seen.zero_()
        return [name for name in names if name not in column]


class HostCopy:
    """Which scales are known on the host not to be 0: asked for now and then, learnt a step later, never waited for.

    A scale that is not 0 stays so, until others are loaded.
    """

    def __init__(self) -> None:
        self._known: list[bool] = []
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def knows(self, row: int) -> bool:
        return row < len(self._known) and self._known[row]

    def follow(self, scale: Tensor) -> None:
        """Look at ``scale [n]`` after an update: at once on the CPU; a card is asked, or its answer taken."""
        if self._known and all(self._known):
            return
        if not scale.is_cuda:
            self._known = (scale > 0).tolist()
        elif torch.cuda.is_current_stream_capturing():
            return
        elif self._arriving is None:
            copy = torch.empty(scale.shape, dtype=torch.bool, pin_memory=True)
            copy.copy_(scale > 0, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._arriving = copy, event
        elif self._arriving[1].query():
            self._known, self._arriving = self._arriving[0].tolist(), None

    def __reduce__(self) -> tuple[type[HostCopy], tuple[()]]:
        return HostCopy, ()  # copies and pickles ask again


@dataclass(eq=False)
class Slot:
    """One row of an :class:`AmaxHistory`, as a module sees it.

    No tuple: what is compiled for one module would be for its row alone, and again for every other's.

    Attributes:
        history: what the row is of.
        row: which.
        scale: float32 ``[]``; read by value, it changes at the next update.
        seen: float32 ``[]`` that a cast writes its amax into.
    """

    history: AmaxHistory
    row: int
    scale: Tensor
    seen: Tensor

    def __reduce__(self) -> Any:
        return AmaxHistory.slot, (self.history, self.row)  # copies and pickles share what their history has

    @property
    def name(self) -> str:
        return self.history.names[self.row]

    @property
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
        amaxes = torch.cat([history.seen for history in histories])
        # A collective's maximum may drop a NaN, and ranks must agree; inf keeps the old scale just as well.
        torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for history, amax in zip(histories, amaxes.split([len(history.names) for history in histories])):
            history.seen.copy_(amax)
    for history in histories:
        history._advance(recipe)


def update_living(recipe: DelayedScaling, group: dist.ProcessGroup | None = None) -> None:
    """Update every living history, in the order they were made (ranks must agree); for training without a plugin."""
    update_together(sorted(_living, key=lambda history: history.serial), recipe, group)


def validated_state(state: Any) -> tuple[list[str], Tensor, Tensor, int]:
    """The names, scales, window and update count of a saved state.

    Raises:
        ValueError: a key is missing or a value has the wrong type, dtype or shape; the message names it.
    """
    if not isinstance(state, dict):
        raise ValueError(
            f"FP8 state must be a dictionary, not {type(state).__name__}; save it with fp8_state_dict(model)"
        )
    missing = [key for key in ("names", "scale", "amax_history", "updates") if key not in state]
    if missing:
        raise ValueError(
            f"FP8 state lacks {missing}; it holds {sorted(map(str, state))}. Save it with fp8_state_dict(model)"
        )
    names, scale, window, updates = state["names"], state["scale"], state["amax_history"], state["updates"]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("FP8 state's 'names' must be a list of strings")
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise ValueError(f"FP8 state's 'updates' must be a count, not {updates!r}")
    for key, value, shape in (("scale", scale, (len(names),)), ("amax_history", window, (None, len(names)))):
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise ValueError(
                f"FP8 state's {key!r} must be a float32 tensor, not {getattr(value, 'dtype', type(value))}"
            )
        if value.dim() != len(shape) or value.shape[-1] != shape[-1]:
            raise ValueError(f"FP8 state's {key!r} has shape {tuple(value.shape)} for {len(names)} names")
        if not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise ValueError(f"FP8 state's {key!r} holds negative, infinite or NaN values; the file is damaged")
    return names, scale, window, updates
