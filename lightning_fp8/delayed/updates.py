"""The scale update of the histories that no plugin looks after."""

from __future__ import annotations

import torch.distributed as dist

from lightning_fp8.delayed.history import AmaxHistory, update_scales
from lightning_fp8.delayed.instances import all_histories, collect_unreachable
from lightning_fp8.recipes import DelayedScaling


def update_all_scales(recipe: DelayedScaling, group: dist.ProcessGroup | None = None, calibrated: bool = False) -> None:
    """Update the histories that no plugin looks after, where their optimizer has stepped or none is known yet.

    Args:
        recipe: for histories whose amaxes were observed under no other recipe.
        group: the ranks that share their scales; ``None`` is every rank where torch.distributed runs.
        calibrated: the amaxes come from calibration, which waits for no optimizer.
    """
    histories_by_recipe: dict[DelayedScaling, list[AmaxHistory]] = {}
    collect_unreachable(group)
    for history in all_histories():
        if history.after_step is None and (history.steps or calibrated):
            histories_by_recipe.setdefault(history.recipe or recipe, []).append(history)
        elif history.after_step is None:
            history.wait()
    for observed_under, histories in histories_by_recipe.items():
        update_scales(histories, observed_under, group)
