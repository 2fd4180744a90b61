"""The update of delayed scaling: once per optimizer step, of the slots that the optimizer owns.

The step hook of ``torch.optim`` triggers the update in plain loops, under Fabric and in a Trainer. If an optimizer
steps inside a backward pass, for example once for each parameter, the end of that backward pass triggers it. Explicit
triggers are ``update_scales()`` of a plugin, ``update_fp8_scales(model)``, and the end of a calibrating region.

First, the amaxes of slots that are not updated are saved and cleared, and the other amaxes are reduced over ranks. Then
:func:`_advance` converts scales of another format or margin (``rescaling`` in ``numerics/scaling.py``) and appends the
amaxes to each history. The new scale is ``fp8_max 2**-margin / amax``, at most float32's largest value, where amax is
the history's maximum or its newest step. A tensor whose amax is 0, inf or NaN keeps its scale and its history. This is
``ops.update_scales``, one launch. Its formulas are ``updated_scales`` in ``numerics/scaling.py``, and its kernel is
``cuda_kernels/casts/update_scales.py``.

Ranks share their scales by one collective, by position. If only some ranks began a collective, they would hang. So the
decision must not depend on what a rank ran, only on state that is equal on all ranks: the recipe of the plugin, or of
the last outermost training region, determines whether amaxes are reduced, and the region determines the group. The
names of slots are compared over ranks before the first reduction.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fp8 import ops
from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.history import WARM_UP, WARM_UP_STEPS, AmaxHistory, Span, all_histories, span_of, span_ratio
from lightning_fp8.delayed.owners import (
    Slots,
    all_slots,
    mask_of,
    note_step,
    owned_by,
    parameter_ids,
    slots_without_optimizer,
)
from lightning_fp8.delayed.watch import UPDATES_OF_OTHERS, uses_begin
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaling import FLOAT32_MAX, is_usable

# --- Which recipe, and which ranks ------------------------------------------------------------------------------------


@dataclass
class _Region:
    """The last outermost ``fp8_autocast`` region with gradients enabled. All ranks enter the same regions.

    Attributes:
        recipe: the recipe for amaxes whose recipe is unknown; None before the first region.
        group: the ranks that share their scales; ``None`` is all ranks.
    """

    recipe: DelayedScaling | None = None
    group: dist.ProcessGroup | None = None


_region = _Region()


def region_begins(recipe: DelayedScaling, group: dist.ProcessGroup | None, *, training: bool) -> None:
    """Record the entry of an outermost ``fp8_autocast`` region.

    Args:
        training: whether gradients are enabled.
    """
    if training or _region.recipe is None:
        _region.recipe = recipe
        _region.group = group
    if torch.compiler.is_compiling():
        return
    histories = [history for history in all_histories() if history.plugin_recipe is None]
    uses_begin(history.watch for history in histories)
    if training:
        for history in histories:
            history.training_forward_begins()
        if histories and recipe.reduce_amax:
            refuse_join(group)
        update_waiting(histories)


def update_waiting(histories: Iterable[AmaxHistory]) -> None:
    """Run pending updates: those of :func:`_end_of_backward`, and those of loaded states.

    In plain loops, earlier versions saved the amaxes of a step before its update.
    """
    if _stepped_in_backward and _current_backward() < 0:
        _update_after_backward()
    if waiting := [history for history in histories if history.steps]:
        update_slots(all_slots(waiting))


# --- The update -------------------------------------------------------------------------------------------------------


def reduce_and_update(
    histories: Sequence[AmaxHistory], recipe: DelayedScaling, group: dist.ProcessGroup | None = None
) -> None:
    """Update all slots of several histories with one collective: the element-wise maximum of all their amaxes.

    Args:
        histories: the histories to update.
        recipe: the margin, interval, history length and algorithm.
        group: the ranks that share their scales; ``None`` is all ranks.

    Raises:
        RuntimeError: If ranks would share the scales of different tensors.
    """
    _reduce_and_update(all_slots(histories), dict.fromkeys(histories, recipe), recipe.reduce_amax, group)


def update_slots(owned: Iterable[tuple[AmaxHistory, Slots]]) -> None:
    """Update these slots, with one collective for all models of plugins and one for all models without a plugin.

    If the recipe of a plugin has no state, amaxes can only come from nested ``fp8_autocast`` regions. A rank does not
    know whether such a region ran on other ranks, so each rank then has its own scales.
    """
    of_plugin: list[tuple[AmaxHistory, Slots]] = []
    of_region: list[tuple[AmaxHistory, Slots]] = []
    on_this_rank: list[tuple[AmaxHistory, Slots]] = []
    recipes: dict[AmaxHistory, DelayedScaling] = {}
    for history, slots in owned:
        plugin_recipe = history.plugin_recipe
        observed_under = history.recipe or (_region.recipe if plugin_recipe is None else None)
        if isinstance(plugin_recipe, DelayedScaling):
            recipes[history] = plugin_recipe
            of_plugin.append((history, slots))
        elif observed_under is not None:
            recipes[history] = observed_under
            if plugin_recipe is None:
                of_region.append((history, slots))
            else:
                on_this_rank.append((history, slots))
                if observed_under.reduce_amax and are_several_ranks():
                    _warn_of_own_scales(plugin_recipe.name)
    if of_plugin:
        _reduce_and_update(of_plugin, recipes, recipes[of_plugin[0][0]].reduce_amax, None)
    if of_region:
        recipe = _region.recipe or recipes[of_region[0][0]]
        _reduce_and_update(of_region, recipes, recipe.reduce_amax, _region.group)
    if on_this_rank:
        _reduce_and_update(on_this_rank, recipes, False, None)


def _reduce_and_update(
    owned: Sequence[tuple[AmaxHistory, Slots]],
    recipes: dict[AmaxHistory, DelayedScaling],
    reduce_amax: bool,
    group: dist.ProcessGroup | None,
) -> None:
    put_aside = [(history, _put_aside(history, slots)) for history, slots in owned if len(slots) < len(history.names)]
    if reduce_amax:
        _reduce_amaxes([history for history, _ in owned], group)
    for history, _ in owned:
        _advance(history, recipes[history])
    for history, amaxes in put_aside:
        history.amax.copy_(amaxes)


def _put_aside(history: AmaxHistory, slots: Slots) -> Tensor:
    """Clear the amaxes of all but ``slots``, and return them. A tensor with amax 0 keeps its scale and history."""
    mask = mask_of(history, slots)
    amaxes = history.amax.masked_fill(mask, 0.0)
    history.amax.masked_fill_(~mask, 0.0)
    return amaxes


def _advance(history: AmaxHistory, recipe: DelayedScaling) -> None:
    """Append the amaxes of ``history``, after the reduction over ranks, to it and compute new scales."""
    steps = history.eager_updates[1] if history.eager_updates[0] == recipe else 0
    if is_capturing():
        if steps < WARM_UP_STEPS:
            text = f"a CUDA graph captures an update of FP8 scales after {steps} steps with {recipe}: each replay would"
            raise RuntimeError(f"{text} empty the history that it allocates. Before a capture, {WARM_UP}")
    else:
        history.eager_updates = recipe, steps + 1
        if history.before_update is not None:
            history.before_update(history)
    history.resize(recipe.amax_history_len)
    history.updates += 1
    if history.steps is not None:
        history.steps = 0
    history.watch.updated()
    _rescale_to(history, span_of(recipe))
    previous_scale: Tensor | None = None
    if recipe.interval > 1:
        previous_scale = history.scale.clone()
        # An update in which a tensor did not run or overflowed does not count towards its interval.
        history.num_observed += is_usable(history.amax)
    ops.update_scales(
        history.amax,
        history.amax_history,
        history.scale,
        _fp8_max(history, recipe),
        recipe.margin,
        recipe.amax_compute_algo,
    )
    if previous_scale is not None:
        due = history.num_observed % recipe.interval == 0
        history.scale.copy_(torch.where(due, history.scale, previous_scale))
    history.nonzero_scales.poll(history.scale)


def _rescale_to(history: AmaxHistory, span: Span) -> None:
    """Convert the scales to the format and margin of ``span``, for those that the update keeps."""
    ratios = {role: span_ratio(history.span, span, role) for role in dict.fromkeys(history.roles)}
    if any(ratio != 1 for ratio in ratios.values()):
        history.scale *= history.scale.new_tensor([ratios[role] for role in history.roles])
        history.scale.clamp_(max=FLOAT32_MAX)
    history.span = span


def _fp8_max(history: AmaxHistory, recipe: DelayedScaling) -> Tensor:
    """The largest value of each slot's format, float32 ``[n]``."""
    key = recipe.fp8_format, history.scale.device
    if history.fp8_max is None or history.fp8_max[0] != key:
        values = [recipe.cast(role).float8.max for role in history.roles]
        history.fp8_max = key, torch.tensor(values, dtype=torch.float32, device=history.scale.device)
    return history.fp8_max[1]


@cache
def _warn_of_own_scales(name: str) -> None:
    warnings.warn(
        f"reduce_amax=True is ignored in a delayed-scaling region inside recipe={name!r}: each rank has its own "
        "scales. To share scales, pass recipe='delayed' to the plugin and the other recipe to fp8_autocast",
        stacklevel=2,
    )


def update_calibrated(recipe: DelayedScaling, group: dist.ProcessGroup | None) -> None:
    """Compute scales from amaxes that calibration observed on any rank. Models of plugins are updated at their step.

    Args:
        recipe: the recipe of the outermost calibrating region.
        group: the ranks that share their scales; ``None`` is all ranks.
    """
    histories = [history for history in all_histories() if history.plugin_recipe is None]
    reduces = recipe.reduce_amax and are_several_ranks(group)
    put_aside = [(history, _put_aside(history, frozenset())) for history in histories if not history.calibrated]
    if reduces:
        _reduce_amaxes(histories, group)
    for history in histories:
        if history.calibrated or (reduces and bool(history.amax.any())):
            _advance(history, recipe)
        history.calibrated = False
    for history, amaxes in put_aside:
        history.amax.copy_(amaxes)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def _reduce_amaxes(histories: Sequence[AmaxHistory], group: dist.ProcessGroup | None) -> None:
    """Replace the amaxes of ``histories`` by their maximum over ``group``; ``None`` is all ranks.

    Raises:
        RuntimeError: If the names of slots differ between ranks, on all ranks; or in a ``Join`` context.
    """
    if not histories or not are_several_ranks(group):
        return
    if _has_uneven_inputs(group):
        if not any(bool(history.amax.any()) for history in histories):
            return  # the step ran by a recipe without state
        refuse_join(group)
    _compare_names(histories, group)
    amaxes = torch.cat([history.amax for history in histories])
    # A collective's maximum may drop a NaN on some ranks. inf keeps the old scale, too.
    torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for history, amax in zip(histories, amaxes.split([len(history.names) for history in histories])):
        history.amax.copy_(amax)


def are_several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group`` has more than one rank; ``None`` is all ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


_joins: list[Join] = []
"""The ``Join`` contexts that this process has entered. DistributedDataParallel does not tell whether it is in one."""


def _track_joins() -> None:
    enter, leave = Join.__enter__, Join.__exit__

    @wraps(enter)
    def entered(self: Join) -> Any:
        _joins.append(self)
        return enter(self)  # type: ignore[no-untyped-call]

    @wraps(leave)
    def left(self: Join, *exception: Any) -> Any:
        try:
            return leave(self, *exception)
        finally:
            _joins[:] = [each for each in _joins if each is not self]

    Join.__enter__, Join.__exit__ = entered, left  # type: ignore[method-assign]


if dist.is_available():
    from torch.distributed.algorithms.join import Join

    _track_joins()


def refuse_join(group: dist.ProcessGroup | None = None) -> None:
    """Called where amaxes of ``group`` will be reduced.

    Raises:
        RuntimeError: In a ``Join`` context with uneven inputs. A rank whose inputs have ended repeats only the
            collectives of DistributedDataParallel, which would meet the reduction of amaxes on other ranks.
    """
    if _has_uneven_inputs(group):
        raise RuntimeError(
            "delayed scaling with reduce_amax=True reduces amaxes over ranks in each optimizer step, and is not "
            "supported in join() of DistributedDataParallel or Join(...): a rank whose inputs have ended does not take "
            "part. Use DelayedScaling(reduce_amax=False), with which each rank has its own scales; a recipe without "
            "state, such as 'tensorwise'; or join(throw_on_early_termination=True)"
        )


def refuse_default_dtype_in_join() -> None:
    """Called where a plugin has set torch's default dtype.

    Raises:
        RuntimeError: In a ``Join`` context with uneven inputs, unless the default dtype is float32.
    """
    if _has_uneven_inputs() and (dtype := torch.get_default_dtype()) is not torch.float32:
        raise RuntimeError(
            f"join() sums counters of torch's default dtype, which the plugin, as Lightning's own precision plugins, "
            f"sets to {dtype} inside forwards; ranks whose inputs have ended are outside and send float32. Pass "
            "weights_dtype=torch.float32, or train in a plain loop with convert_module and fp8_autocast"
        )


def _has_uneven_inputs(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process is in a ``Join`` context in which inputs of the ranks of ``group`` may end."""
    uneven = any(each._enable and not each._throw_on_early_termination for each in _joins)
    return uneven and are_several_ranks(group)


_compared: weakref.WeakKeyDictionary[AmaxHistory, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""By their first history, the lists that were compared: group, creation indices, numbers of slots."""


@torch.compiler.disable
def _compare_names(histories: Sequence[AmaxHistory], group: dist.ProcessGroup | None) -> None:
    """Compare the names of slots over ``group``, once for each list of histories. This synchronizes with the GPU."""
    compared = _compared.setdefault(histories[0], set())
    key = id(group), *((history.creation_index, len(history.names)) for history in histories)
    device = histories[0].amax.device
    if key in compared or is_capturing():
        return
    names = [name for history in histories for name in history.names]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    own = torch.tensor([len(names), int.from_bytes(digest[:7], "big")], device=device)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    gathered = torch.stack(everyones).tolist()
    if any(everyone != gathered[0] for everyone in gathered):
        names_by_rank: list[list[str]] = [[] for _ in everyones]
        dist.all_gather_object(names_by_rank, names, group=group)
        raise RuntimeError(_difference(dict(zip(dist.get_process_group_ranks(group), names_by_rank))))
    compared.add(key)


def _difference(names_by_rank: dict[int, list[str]]) -> str:
    """The error message for names of slots that differ between ranks."""
    ranks_by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, names in names_by_rank.items():
        ranks_by_names.setdefault(tuple(names), []).append(rank)
    first, other = list(ranks_by_names)[:2]
    index = next(index for index, pair in enumerate(itertools.zip_longest(first, other)) if len(set(pair)) > 1)
    counts = "; ".join(f"{len(names)} on ranks {ranks}" for names, ranks in ranks_by_names.items())
    differing = " and ".join(
        f"{names[index]!r} on ranks {ranks_by_names[names]}"
        if index < len(names)
        else f"none on ranks {ranks_by_names[names]}"
        for names in (first, other)
    )
    return (
        f"ranks would share the FP8 scales of different tensors: there are {counts}; number {index} is {differing}. "
        "Pass the ranks that hold the same layers as fp8_group of fp8_autocast, or use "
        "DelayedScaling(reduce_amax=False), with which each rank has its own scales"
    )


# --- Optimizer steps, by the hooks of torch.optim ---------------------------------------------------------------------

_numbers = itertools.count(1)  # unique across threads
_step_number = 0
_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""The code of the wrapper around every ``step`` of torch.optim, which calls the hooks."""
steps_are_captured = False
"""Whether a CUDA graph has captured an optimizer step: its replays change weights, and do not count steps."""


def optimizer_step_number() -> int:
    """The number of the last optimizer step in this process. Cached copies of weights are stale once it changes."""
    return _step_number


def _current_backward() -> int:
    """The number of the backward pass that autograd is running on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def _is_inner_step(optimizer: Any) -> bool:
    """Whether this step runs inside the step of another optimizer of the same parameters.

    ``ZeroRedundancyOptimizer`` does so. Its inner optimizer may hold other parameters on each rank, so the outer step
    counts. An optimizer with other parameters that steps in the closure of another one is not an inner optimizer.
    """
    parameters = set(parameter_ids(optimizer))
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is _STEP:
            outer = frame.f_locals.get("self", optimizer)
            if outer is not optimizer and not parameters.isdisjoint(parameter_ids(outer)):
                return True
    return False


def _overflowed(optimizer: Any) -> bool:
    """Whether the gradients of a fused optimizer with ``GradScaler`` are infinite, so that its step has no effect.

    A tensor on the GPU is not read, because the host would wait for it.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


# A compiled step has a graph break here, as torch's own optimizers have at their beginning and end.
@torch.compiler.disable
def after_optimizer_step(optimizer: Any, *_: Any) -> None:
    """Update the slots that ``optimizer`` owns. torch's optimizers call it by their step hook.

    Args:
        optimizer: an object with ``param_groups``.
    """
    global _step_number, steps_are_captured
    _step_number = next(_numbers)
    steps_are_captured |= is_capturing()
    if _overflowed(optimizer):
        return
    note_step(optimizer)
    if _current_backward() >= 0:
        _put_off(optimizer)
    elif not _is_inner_step(optimizer):
        _update_owned(owned_by(optimizer))


def _update_owned(owned: Sequence[tuple[AmaxHistory, Slots]]) -> None:
    for history, _ in owned:
        history.steps = history.steps or 0
        history.watch.stepped = True
    without_slots = [history for history in all_histories() if not history.names]
    for history in (*(history for history, _ in owned), *without_slots):
        if history.choice is not None:
            decide_where_faster(history)
    update_slots(owned)
    for history, _ in owned:
        if history.updates % UPDATES_OF_OTHERS == 0 and not (history.watch.has_warned_of_others or is_capturing()):
            waiting = [slot for slot in slots_without_optimizer(history) if bool(history.amax[slot] > 0)]
            if waiting:
                history.watch.warn_of_others([history.names[slot] for slot in waiting])


def decide_where_faster(history: AmaxHistory) -> None:
    """Decide which layers stay in high precision, on all ranks alike where they take part in every step."""
    if history.plugin_recipe is not None:
        history.choice.decide(None)
    else:
        recipe = _region.recipe or history.recipe
        history.choice.decide(_region.group, together=recipe is not None and recipe.reduce_amax)


_stepped_in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers that have stepped in the running backward pass."""
_awaited: int | None = None
"""The backward pass whose end will update their slots."""


def _put_off(optimizer: Any) -> None:
    """Defer the update to the end of the backward pass, in which scales must not change."""
    global _awaited
    _stepped_in_backward.add(optimizer)
    for history, _ in owned_by(optimizer):
        history.steps = 1
    if _awaited != _current_backward():
        _awaited = _current_backward()
        torch.autograd.Variable._execution_engine.queue_callback(_end_of_backward)  # type: ignore[attr-defined]


def _end_of_backward() -> None:
    # A nested backward pass, as in reentrant checkpointing, ends while a node of the outer one runs. If the outer one
    # does not step an optimizer, the next training forward updates.
    if torch._C._current_autograd_node() is None:
        _update_after_backward()


def _update_after_backward() -> None:
    global _awaited
    _awaited = None
    owned: dict[AmaxHistory, set[int]] = {}
    for optimizer in list(_stepped_in_backward):
        for history, slots in owned_by(optimizer):
            owned.setdefault(history, set()).update(slots)
    _stepped_in_backward.clear()
    in_order = sorted(owned, key=lambda history: history.creation_index)
    _update_owned([(history, frozenset(owned[history])) for history in in_order])


register_optimizer_step_post_hook(after_optimizer_step)
