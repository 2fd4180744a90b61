"""``fp8_autocast``: which recipe FP8 modules use in a region of code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_fp8.arguments import require_bool
from lightning_fp8.history import any_living, update_living
from lightning_fp8.recipes import DelayedScaling, Recipe, make_recipe


@dataclass(frozen=True)
class Setting:
    """What a region says to the FP8 modules called in it.

    Attributes:
        recipe: how to cast.
        enabled: compute in FP8.
        calibrating: while not enabled, collect amaxes.
        group: the ranks that share their scales.
    """

    recipe: Recipe
    enabled: bool = True
    calibrating: bool = False
    group: dist.ProcessGroup | None = None


OUTSIDE = Setting(DelayedScaling(), enabled=False)

# A module-level value: torch.compile(fullgraph=True) guards on one, but cannot trace a ContextVar.
_current = OUTSIDE
_active_regions = 0


def current_setting() -> Setting:
    """The setting of the innermost region, or :data:`OUTSIDE`."""
    return _current


def in_backward() -> bool:
    """Whether autograd is running on this thread, as it is while activation checkpointing recomputes a forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@contextmanager
def region(setting: Setting) -> Iterator[None]:
    """Use ``setting`` inside; updates no scales."""
    global _current, _active_regions
    previous, active = _current, setting.enabled or setting.calibrating
    _current = setting
    _active_regions += active
    try:
        yield
    finally:
        _current = previous
        _active_regions -= active


class fp8_autocast(ContextDecorator):
    """Run FP8 modules in FP8 inside this region.

    The backward pass and the recomputation of checkpointed activations belong outside; they follow the setting of
    their forward. Regions nest, the innermost rules. Where no plugin looks after the model, entering the outermost
    active region with gradients enabled updates the delayed scales from what the region before it saw.

    Args:
        enabled: False runs modules in high precision, also inside an enabled region.
        calibrating: with ``enabled=False``, collect the amaxes of inputs, weights and gradients; leaving the
            outermost calibrating region turns them into scales.
        fp8_recipe: a recipe or anything :func:`make_recipe` takes; ``None`` is ``DelayedScaling()``.
        fp8_group: process group whose ranks share their scales; ``None`` is all ranks.

    Raises:
        ValueError, TypeError: ``fp8_recipe`` is not a recipe; see :func:`make_recipe`.
        TypeError: ``enabled`` or ``calibrating`` is not a bool, or ``fp8_group`` not a process group.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_arguments(enabled, calibrating, fp8_group)
        recipe = DelayedScaling() if fp8_recipe is None else make_recipe(fp8_recipe)
        self.setting = Setting(recipe, enabled, calibrating, fp8_group)
        self._regions: list[Any] = []

    def __enter__(self) -> fp8_autocast:
        if not _active_regions and torch.is_grad_enabled():
            self._update_scales()
        entered = region(self.setting)
        entered.__enter__()
        self._regions.append(entered)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._regions.pop().__exit__(*exception)
        if self.setting.enabled and exception[0] is None and not torch.compiler.is_compiling() and not any_living():
            warnings.warn("fp8_autocast ran nothing in FP8: there is no FP8 layer; convert_module(model)", stacklevel=2)
        if not _active_regions and self.setting.calibrating and exception[0] is None:
            self._update_scales()

    def _update_scales(self) -> None:
        recipe, setting = self.setting.recipe, self.setting
        if isinstance(recipe, DelayedScaling) and (setting.enabled or setting.calibrating):
            update_living(recipe, setting.group)


def _check_arguments(enabled: Any, calibrating: Any, fp8_group: Any) -> None:
    if callable(enabled):
        raise TypeError(f"enabled={enabled!r} must be True or False; as a decorator write @fp8_autocast()")
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled={enabled!r}, the first argument, must be True or False; a recipe is "
            f"fp8_autocast(fp8_recipe={enabled!r})"
        )
    require_bool("calibrating", calibrating)
    if fp8_group is not None and not _is_group(fp8_group):
        raise TypeError(f"fp8_group={fp8_group!r} must be a torch.distributed.ProcessGroup, or None for all ranks")


def _is_group(group: Any) -> bool:
    if not dist.is_available():
        return False
    return isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
