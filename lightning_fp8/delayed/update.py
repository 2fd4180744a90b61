"""The update of delayed scaling: once per optimizer step, of the models of which the optimizer holds a parameter.

The step hook of ``torch.optim`` triggers the update in plain loops, under Fabric and in a Trainer. If an optimizer
steps inside a backward pass, for example once for each parameter, the end of that backward pass triggers it. Explicit
triggers are ``update_scales()`` of a plugin, ``update_fp8_scales(model)``, and the end of a calibrating region.

A model has one history, so two networks of one model, with an optimizer each, are updated by both. A tensor that has
not run since the last update has amax 0 and keeps its scale. Frozen layers are updated with the rest of their model.

First, the amaxes are reduced over ranks. Then :func:`_advance` converts scales of another format or margin
(``rescaling`` in ``numerics/scaling.py``) and appends the amaxes to each history. The new scale is
``fp8_max 2**-margin / amax``, at most float32's largest value, where amax is the history's maximum or its newest step.
A tensor whose amax is 0, inf or NaN keeps its scale and its history. This is ``ops.update_scales``, one launch. Its
formulas are ``updated_scales`` in ``numerics/scaling.py``, and its kernel is ``cuda_kernels/casts/update_scales.py``.

Ranks share their scales by one collective, by position. If only some ranks began a collective, they would hang. So the
decision must not depend on what a rank ran, only on state that is equal on all ranks: the recipe of the plugin, or of
the last outermost training region, determines whether amaxes are reduced, and the region determines the group. The
names of slots are compared over ranks before the first reduction.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from lightning_fp8 import ops, optimizer_steps
from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.history import (
    WARM_UP,
    WARM_UP_STEPS,
    AmaxHistory,
    Span,
    all_histories,
    histories_of_regions,
    living,
    span_of,
    span_ratio,
)
from lightning_fp8.delayed.watch import uses_begin
from lightning_fp8.notices import say_once
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaling import FLOAT32_MAX, is_usable
from lightning_fp8.optimizer_steps import parameter_ids
from lightning_fp8.threads import NO_BACKWARD

# --- Which recipe, and which ranks ------------------------------------------------------------------------------------


@dataclass
class _Region:
    """The last outermost ``fp8_autocast`` region with gradients enabled. All ranks enter the same regions.

    Attributes:
        recipe: the recipe for amaxes whose recipe is unknown; None before the first region.
        group: the ranks that share their scales; ``None`` is all ranks.
        listens: whether optimizer steps update scales; see :func:`listen`.
    """

    recipe: DelayedScaling | None = None
    group: dist.ProcessGroup | None = None
    listens: bool = False


_region = _Region()


def region_begins(recipe: DelayedScaling, group: dist.ProcessGroup | None, outermost: bool, *, training: bool) -> None:
    """Record the entry of an ``fp8_autocast`` region in which amaxes may be observed.

    Args:
        training: whether gradients are enabled.
    """
    if not _region.listens:
        listen()
    if not outermost:
        return
    if training or _region.recipe is None:
        _region.recipe = recipe
        _region.group = group
    if not torch.compiler.is_compiling():
        forwards_begin(histories_of_regions(), training, recipe.reduce_amax, group)


def forwards_begin(
    histories: Sequence[AmaxHistory],
    training: bool,
    reduce_amax: bool,
    group: dist.ProcessGroup | None = None,
    observes: bool = False,
) -> None:
    """Note the forward that begins, and run pending updates: those of :func:`_end_of_backward`, and of loaded states.

    In plain loops, earlier versions saved the amaxes of a step before its update.

    Args:
        observes: the forward counts as one that observes amaxes, which compiled layers do not tell.
    """
    loaded, is_pending = [], _awaited is not None
    for history in histories:
        if history.watch.weights_loaded or history.watch.state_loaded:
            loaded.append(history.watch)
        if training:
            history.watch.forward_begins(history.updates, history.is_training, observes)
        is_pending |= bool(history.steps)
    if loaded:
        uses_begin(loaded)
    if training and histories and reduce_amax and _joins:
        refuse_join(group)
    if training and is_pending:
        update_pending(histories)


def update_pending(histories: Iterable[AmaxHistory]) -> None:
    """Run the updates that wait for the end of a backward pass or of a state's step."""
    if _stepped_in_backward and _current_backward() == NO_BACKWARD:
        _update_after_backward()
    update([history for history in histories if history.steps])


# --- The update -------------------------------------------------------------------------------------------------------


def update(histories: Iterable[AmaxHistory]) -> None:
    """Update ``histories``, with one collective each for the models of plugins, with a recipe of their own, and others.

    If the recipe of a plugin has no state, amaxes can only come from nested ``fp8_autocast`` regions. A rank does not
    know whether such a region ran on other ranks, so each rank then has its own scales.
    """
    of_plugin: dict[AmaxHistory, DelayedScaling] = {}
    of_own: dict[bool, dict[AmaxHistory, DelayedScaling]] = {True: {}, False: {}}
    of_region: dict[AmaxHistory, DelayedScaling] = {}
    on_this_rank: dict[AmaxHistory, DelayedScaling] = {}
    for history in histories:
        plugin_recipe = history.plugin_recipe
        observed_under = history.recipe or (_region.recipe if plugin_recipe is None else None)
        if isinstance(plugin_recipe, DelayedScaling):
            of_plugin[history] = plugin_recipe
        elif plugin_recipe is None and history.own_recipe is not None:
            of_own[history.own_recipe.reduce_amax][history] = history.recipe or history.own_recipe
        elif observed_under is not None:
            (of_region if plugin_recipe is None else on_this_rank)[history] = observed_under
            if plugin_recipe is not None and observed_under.reduce_amax and are_several_ranks():
                _warn_of_own_scales(plugin_recipe.name)
    if of_plugin:
        reduce_and_update(of_plugin, next(iter(of_plugin.values())).reduce_amax)
    for reduces, recipes in of_own.items():
        if recipes:
            reduce_and_update(recipes, reduces, _region.group)
    if of_region:
        reduces = (_region.recipe or next(iter(of_region.values()))).reduce_amax
        reduce_and_update(of_region, reduces, _region.group)
    if on_this_rank:
        reduce_and_update(on_this_rank, reduce_amax=False)


def reduce_and_update(
    recipes: Mapping[AmaxHistory, DelayedScaling], reduce_amax: bool = True, group: dist.ProcessGroup | None = None
) -> None:
    """Update several histories by their recipes, with one collective: the element-wise maximum of all their amaxes.

    Args:
        group: the ranks that share their scales; ``None`` is all ranks.

    Raises:
        RuntimeError: If ranks would share the scales of different tensors.
    """
    if reduce_amax:
        _reduce_amaxes([*recipes], group)
    for history, recipe in recipes.items():
        _advance(history, recipe)


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


_said: dict[Any, str] = {}


def _warn_of_own_scales(name: str) -> None:
    say_once(
        _said,
        f"reduce_amax=True is ignored in a delayed-scaling region inside recipe={name!r}: each rank has its own "
        "scales. To share scales, pass recipe='delayed' to the plugin and the other recipe to fp8_autocast",
        stacklevel=3,
    )


def update_calibrated(recipe: DelayedScaling, group: dist.ProcessGroup | None) -> None:
    """Compute scales from amaxes that calibration observed on any rank. Models of plugins are updated at their step.

    Args:
        recipe: the recipe of the outermost calibrating region.
        group: the ranks that share their scales; ``None`` is all ranks.
    """
    histories = histories_of_regions()
    reduces = recipe.reduce_amax and are_several_ranks(group)
    put_aside = [(history, history.amax.clone()) for history in histories if reduces and not history.calibrated]
    for history, _ in put_aside:
        history.amax.zero_()
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
    _compare_names(histories, group)  # with ranks that have slots, so it comes first
    if not any(history.names for history in histories):
        return
    amaxes = torch.cat([history.amax for history in histories])
    # A collective's maximum may drop a NaN on some ranks. inf keeps the old scale, too.
    torch.nan_to_num_(amaxes, nan=math.inf, posinf=math.inf)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for history, amax in zip(histories, amaxes.split([len(history.names) for history in histories])):
        history.amax.copy_(amax)


def are_several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``group`` has more than one rank; ``None`` is all ranks."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


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


# --- Optimizer steps --------------------------------------------------------------------------------------------------

_STEP = Optimizer.profile_hook_step(lambda self: None).__code__
"""The code of the wrapper around every ``step`` of torch.optim, which calls the hooks."""


def listen() -> None:
    """Let optimizer steps update scales, for as long as there is something to update."""
    _region.listens = True
    if after_optimizer_step not in optimizer_steps.after:
        optimizer_steps.after.insert(0, after_optimizer_step)  # those who report what a step did come later


def _waits_for_steps(history: AmaxHistory) -> bool:
    recipe = history.recipe or history.plugin_recipe or history.own_recipe
    return isinstance(recipe, DelayedScaling) or (history.choice is not None and not history.choice.decided)


def _current_backward() -> int:
    """The number of the backward pass that autograd is running on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def _is_inner_step(optimizer: Any) -> bool:
    """Whether this step runs inside the step of another optimizer of the same parameters.

    ``ZeroRedundancyOptimizer`` does so. Its inner optimizer may hold other parameters on each rank, so the outer step
    counts. An optimizer with other parameters that steps in the closure of another one is not an inner optimizer.
    """
    parameters = parameter_ids(optimizer)
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


def after_optimizer_step(optimizer: Any) -> None:
    """Update the models of which ``optimizer``, an object with ``param_groups``, holds a parameter."""
    if _region.recipe is None and not any(map(_waits_for_steps, all_histories())):
        optimizer_steps.leave(optimizer_steps.after, after_optimizer_step)
        _region.listens = False
    elif not _overflowed(optimizer):
        if _current_backward() != NO_BACKWARD:
            _put_off(optimizer)
        elif not _is_inner_step(optimizer):
            _update_stepped(histories_of(parameter_ids(optimizer)))


def histories_of(parameters: set[int]) -> list[AmaxHistory]:
    """The histories of the models that have one of ``parameters``, given by their ``id``, in order of creation.

    A history whose modules have no parameters, or only frozen ones and no known root, as those of a copied or unpickled
    part of a model, follows every optimizer.
    """
    _collect_unreachable()
    return [history for history in all_histories() if _has_any(history, parameters)]


def _has_any(history: AmaxHistory, parameters: set[int]) -> bool:
    modules = living(history.modules)
    is_frozen, is_known = True, False
    for each in (parameter for module in modules for parameter in module.parameters()):
        if id(each) in parameters:
            return True
        is_frozen &= not each.requires_grad
        is_known = True
    is_known &= any(not history.slots_of[id(module)] for module in modules)
    return bool(modules) and is_frozen and not is_known


_newest: list[int] = []
"""The index of the newest history at the last run of the garbage collector."""


def _collect_unreachable() -> None:
    """With several ranks, run the garbage collector once for each new model.

    A model in a reference cycle, such as a Trainer's, keeps its history until the garbage collector runs, which happens
    at different times on each rank: ranks would reduce different lists of histories. A new model is created on all
    ranks.
    """
    global _newest
    newest = [history.creation_index for history in all_histories()[-1:]]
    if newest != _newest and are_several_ranks():
        _newest = newest
        gc.collect()


def _update_stepped(histories: Sequence[AmaxHistory]) -> None:
    """Update the histories of models that an optimizer has stepped."""
    for history in histories:
        history.steps = history.steps or 0
        history.watch.stepped = True
    uses_begin(history.watch for history in histories if history.own_recipe is not None)  # compiled layers do not tell
    without_slots = [history for history in all_histories() if not history.names and history not in histories]
    decide_where_faster((*histories, *without_slots))
    update(histories)


def decide_where_faster(histories: Iterable[AmaxHistory]) -> None:
    """Decide which layers stay in high precision, on all ranks alike where they take part in every step."""
    for history in histories:
        if history.choice is None or history.choice.decided:
            continue
        if history.plugin_recipe is not None:
            history.choice.decide(None)
        else:
            recipe = history.own_recipe or _region.recipe or history.recipe
            history.choice.decide(_region.group, together=recipe is not None and recipe.reduce_amax)


_stepped_in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers that have stepped in the running backward pass."""
_awaited: int | None = None
"""The backward pass whose end will update their models."""


def _put_off(optimizer: Any) -> None:
    """Defer the update to the end of the backward pass, in which scales must not change."""
    global _awaited
    _stepped_in_backward.add(optimizer)
    for history in histories_of(parameter_ids(optimizer)):
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
    parameters = set[int]().union(*(parameter_ids(optimizer) for optimizer in list(_stepped_in_backward)))
    _stepped_in_backward.clear()
    _update_stepped(histories_of(parameters))
