"""The update of delayed scaling, once per optimizer step: amaxes are reduced over ranks, then scales computed anew.

When it is time, the plugin says (``update_scales`` in ``plugin/fabric.py``, after a step), or, for histories that no
plugin looks after, ``fp8_autocast`` on entering its outermost region. ``delayed/steps.py`` counts the steps;
:func:`lightning_fp8.scaling.delayed_scale` is the formula, and
:meth:`lightning_fp8.delayed.history.AmaxHistory.advance` writes the scales.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_fp8.delayed.history import AmaxHistory
from lightning_fp8.delayed.instances import all_histories, collect_unreachable
from lightning_fp8.recipes import DelayedScaling

_one_thread = threading.RLock()


def reduce_and_update(
    histories: Sequence[AmaxHistory], recipe: DelayedScaling, group: dist.ProcessGroup | None = None
) -> None:
    """Update several histories with one collective: the element-wise maximum of all their amaxes.

    Args:
        histories: each reduces its amaxes, pushes them into its window and computes new scales.
        recipe: the margin, interval, history length and algorithm.
        group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
    """
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
        history.advance(recipe)


def update_without_plugin(
    recipe: DelayedScaling, group: dist.ProcessGroup | None = None, calibrated: bool = False
) -> None:
    """Update the histories that no plugin looks after, where their optimizer has stepped or none is known yet.

    One thread at a time: a region that another thread begins meanwhile finds all scales updated.

    Args:
        recipe: for histories whose amaxes were observed under no other recipe.
        group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
        calibrated: the amaxes come from calibration, which waits for no optimizer.
    """
    histories_by_recipe: dict[DelayedScaling, list[AmaxHistory]] = {}
    collect_unreachable(group)
    with _one_thread:
        for history in all_histories():
            if history.after_step is None and _is_due(history, calibrated):
                histories_by_recipe.setdefault(history.recipe or recipe, []).append(history)
            elif history.after_step is None:
                history.wait()
        for observed_under, histories in histories_by_recipe.items():
            reduce_and_update(histories, observed_under, group)


def _is_due(history: AmaxHistory, calibrated: bool) -> bool:
    """Whether a region that begins on this thread, or one that ``calibrated`` and ends, is to update the scales.

    Where no optimizer tells that a step is over, another thread that alone trains the model may be amid one.
    """
    if history.steps > 0:
        return True
    threads = history.observed_in or {history.made_in}
    elsewhere = len(threads) == 1 and threading.get_ident() not in threads
    if elsewhere and any(thread.ident in threads for thread in threading.enumerate()):
        return False
    return history.steps < 0 or calibrated
