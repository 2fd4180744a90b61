"""The update of delayed scaling, once per optimizer step: who calls for it, and new scales.

| an optimizer steps | the update is called for by |
|---|---|
| as a step of Lightning | the plugin after it: ``optimizer_step`` in ``plugin/fabric.py`` and ``plugin/precision.py`` |
| outside of one, under a plugin | the hook of :func:`_after_optimizer_step` below, through ``AmaxHistory.after_step`` |
| inside a backward pass, under a plugin | the plugin's next training forward: ``forward_context`` |
| without a plugin | the next outermost ``fp8_autocast`` that takes gradients, at its start; of calibration, its end |

Under a plugin only training forwards count; without one, :func:`update_without_plugin` finds what is due.

First, amaxes are reduced over ranks by ``delayed/over_ranks.py``. The recipe of the plugin, or of the region, says
whether they are; all ranks have the same one. Then :func:`_advance` rescales what was made for another format or margin
(:func:`lightning_fp8.scaling.rescaling`) and pushes the amaxes into each history, by the recipe that they were observed
under. The history's maximum, or its newest step, gives the scales, ``fp8_max 2**-margin / amax``, at most float32's
largest value; a tensor whose amax is 0, inf or NaN keeps its scale and its history. This is ``ops.update_scales``, one
launch, by the formulas of :func:`lightning_fp8.scaling.updated_scales`, which ``cuda_kernels/casts/update_scales.py``
has, too.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fp8 import ops
from lightning_fp8.delayed import regions
from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.instances import all_histories, collect_unreachable
from lightning_fp8.delayed.over_ranks import are_several_ranks, reduce_amaxes
from lightning_fp8.delayed.spans import Span, span_of, span_ratio
from lightning_fp8.recipes import DelayedScaling, Recipe
from lightning_fp8.scaling import FLOAT32_MAX, is_usable

UPDATES_IN_EVAL = 100
"""Updates after which a warning says that the model trains in eval mode."""

COMPARED_AFTER = 100
"""Updates, at least, until unequal slots are compared again, for which the host waits for a GPU."""


def reduce_and_update(
    histories: Sequence[AmaxHistory], recipe: DelayedScaling, group: dist.ProcessGroup | None = None
) -> None:
    """Update several histories with one collective: the element-wise maximum of all their amaxes.

    Args:
        histories: each then pushes its amaxes into its window and computes new scales.
        recipe: the margin, interval, history length and algorithm.
        group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.

    Raises:
        RuntimeError: ranks are to share the scales of unlike tensors.
    """
    if recipe.reduce_amax:
        reduce_amaxes(histories, group)
    for history in histories:
        _advance(history, recipe)


def _advance(history: AmaxHistory, recipe: DelayedScaling) -> None:
    """Push the amaxes of ``history``, reduced over ranks already, into its window and compute new scales."""
    history.resize(recipe.amax_history_len)
    history.updates += 1
    if history.steps is not None:
        history.steps = 0
    history.forwards_since_update = 0
    _watch_mode(history)
    _rescale_to(history, span_of(recipe))
    history.recipe = None
    previous_scale: Tensor | None = None
    if recipe.interval > 1:
        previous_scale = history.scale.clone()
        # An update that passes over a tensor, which did not run or overflowed, brings it no nearer to its next scale.
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
    if history.has_unequal_readers and history.updates % max(len(history.amax_history), COMPARED_AFTER) == 0:
        history.forget_marks()  # what told slots apart may have left the window


def _watch_mode(history: AmaxHistory) -> None:
    """Warn once that updates find no amax because the model trains in eval mode."""
    if history.is_eval_told:
        return
    trained = history.trained_in_eval
    history.trained_in_eval = False
    # Each forward that is observed sets the recipe; gradients without an optimizer are no training.
    unobserved = trained and history.stepped and history.recipe is None
    history.unobserved_updates = history.unobserved_updates + 1 if unobserved else 0
    if history.unobserved_updates >= UPDATES_IN_EVAL:
        history.is_eval_told = True
        warnings.warn(
            f"the FP8 layers train in eval mode, in which delayed scaling observes nothing: their scales did not "
            f"follow for {UPDATES_IN_EVAL} updates. Call model.train(), or take a recipe without state, "
            "recipe='tensorwise'",
            stacklevel=2,
        )


def _rescale_to(history: AmaxHistory, span: Span) -> None:
    """Rescale the scales that an update keeps to the format and margin of ``span``."""
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


def update_of_plugin(histories: Iterable[AmaxHistory], recipe: Recipe) -> None:
    """Update the histories of a plugin: with one collective over all ranks, or none where its recipe keeps no state.

    Args:
        recipe: the plugin's; where it keeps no state, each history is updated by the recipe of the region inside that
            its amaxes were observed under, if any. Whether such a region ran, a rank knows only of itself, and ranks
            that decide unlike on a collective would wait for ever: each then has its own scales.
    """
    if isinstance(recipe, DelayedScaling):
        reduce_and_update(list(histories), recipe)
        return
    for history in histories:
        if (observed_under := history.recipe) is not None:
            if observed_under.reduce_amax and are_several_ranks():
                _warn_of_own_scales(recipe.name)
            _advance(history, observed_under)
        elif history.steps:
            history.steps = 0  # they had nothing to update


def is_update_due(histories: Sequence[AmaxHistory], recipe: Recipe) -> bool:
    """Whether an optimizer has stepped since the last update of a plugin and there may be something to update."""
    has_state = isinstance(recipe, DelayedScaling)
    return any(history.steps and (has_state or history.recipe is not None) for history in histories)


@cache
def _warn_of_own_scales(name: str) -> None:
    warnings.warn(
        f"each rank has its own scales for a region of delayed scaling inside recipe={name!r}: reduce_amax=True is "
        "ignored there. To share them, give the plugin recipe='delayed', and fp8_autocast the other recipe",
        stacklevel=2,
    )


def update_without_plugin(
    recipe: DelayedScaling, group: dist.ProcessGroup | None = None, calibrated: bool = False
) -> None:
    """Update the histories that no plugin looks after, where their optimizer has stepped or none is known yet.

    One thread at a time, without ranks: a region that another thread begins meanwhile finds all scales updated. The
    region that calls this as it begins is then noted in :mod:`~lightning_fp8.delayed.regions`.

    Args:
        recipe: of the region that calls; for histories whose amaxes were observed under no other recipe. It says
            whether the amaxes of all are reduced over ranks: which other regions ran, a rank knows only of itself.
        group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
        calibrated: the amaxes come from calibration, which waits for no optimizer.
    """
    due: list[AmaxHistory] = []
    collect_unreachable(group)
    # Ranks order their collectives themselves: a lock that is held in one could make them wait for each other.
    with nullcontext() if dist.is_available() and dist.is_initialized() else regions.one_thread:
        for history in all_histories():
            if history.after_step is None and _is_due(history, calibrated):
                due.append(history)
            elif history.after_step is None:
                history.wait()
        if recipe.reduce_amax:
            reduce_amaxes(due, group)
        for history in due:
            _advance(history, history.recipe or recipe)
        if not calibrated:
            regions.enter()  # before another thread looks which histories are due


def _is_due(history: AmaxHistory, calibrated: bool) -> bool:
    """Whether a region that begins on this thread, or one that ``calibrated`` and ends, is to update the scales.

    Where no optimizer tells that a step is over, another thread that alone trains the model may be amid one. Which
    thread trains it is known once a forward was observed; until then it may be any that is inside a region. Ranks must
    find the same histories due, and threads are not in step with those of other ranks: there it may be none.
    """
    if history.steps:
        return True
    no_optimizer_known = history.steps is None
    threads = history.observing_threads
    if not threads and not calibrated and regions.another_thread_inside():
        return no_optimizer_known and dist.is_available() and dist.is_initialized()
    if len(threads) == 1 and threading.get_ident() not in threads and regions.running(threads):
        return False
    return no_optimizer_known or calibrated


# --- Optimizer steps, counted where they happen: in torch.optim, whoever calls step and however -----------------------

_numbers = itertools.count(1)  # each is given once, whichever threads step at a time
_step_number = 0
_owned: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], dict[int, bool]]] = weakref.WeakKeyDictionary()
"""For each optimizer the ``id`` of its parameters, and by creation index which histories are its."""


def optimizer_step_number() -> int:
    """The number of an optimizer step in this process; a copy computed from a weight is stale once it is another."""
    return _step_number


def _stepped(optimizer: Optimizer) -> list[AmaxHistory]:
    histories = all_histories()
    parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    known, owned = _owned.get(optimizer, ([], {}))
    if parameters != known or any(history.creation_index not in owned for history in histories):
        ids = set(parameters)
        owned = {history.creation_index: history.is_stepped_by(ids) for history in histories}
        _owned[optimizer] = parameters, owned
    return [history for history in histories if owned[history.creation_index]]


def _overflowed(optimizer: Optimizer) -> bool:
    """Whether ``GradScaler`` has a fused optimizer step over infinite gradients, which changes nothing.

    A tensor on the GPU is not read: the host would wait for it.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


# A compiled step breaks its graph here, as torch's own optimizers do at their beginning and end.
@torch.compiler.disable
def _before_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(history.steps is None for history in all_histories()):
        for history in _stepped(optimizer):
            history.steps = history.steps or 0  # an optimizer is known: what its closure runs belongs to its step


@torch.compiler.disable
def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _step_number
    _step_number = next(_numbers)
    if _overflowed(optimizer):
        return
    stepped = _stepped(optimizer)
    for history in stepped:
        history.count_step()
    for update in dict.fromkeys(history.after_step for history in stepped if history.after_step is not None):
        update()


register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)
