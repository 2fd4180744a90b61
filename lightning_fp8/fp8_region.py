"""``fp8_autocast``, or ``autocast``: sets the recipe that FP8 modules use in a region of code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import ContextDecorator, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lightning_fp8.arguments import naming_arguments, plain
from lightning_fp8.capture import is_capturing
from lightning_fp8.delayed.history import AmaxHistory, any_history
from lightning_fp8.delayed.update import forwards_begin, region_begins, update_calibrated
from lightning_fp8.numerics.recipes import DelayedScaling, Recipe, make_recipe
from lightning_fp8.optimizer_steps import leave
from lightning_fp8.threads import NO_BACKWARD, thread


@dataclass(frozen=True)
class FP8Context:
    """The recipe and flags of the FP8 modules that are called inside a region of code.

    Attributes:
        recipe: how to cast.
        enabled: compute in FP8.
        calibrating: while not enabled, collect amaxes.
        group: the ranks that share their scales.
        observe: whether layers in training mode may collect amaxes; False during an evaluation.
        weight_period: layers cache the FP8 copies of their weights through all regions with the same value, until an
            optimizer steps; None caches nothing.
        outside: whether this is the context of code outside every region.
        chosen: a layer's own, with which it was chosen: its place in the model does not keep it in high precision.
    """

    recipe: Recipe
    enabled: bool = True
    calibrating: bool = False
    group: dist.ProcessGroup | None = None
    observe: bool = True
    weight_period: Hashable = None
    outside: bool = False
    chosen: bool = False

    @property
    def attention(self) -> bool:
        """Whether attention also computes in FP8."""
        return self.enabled and (self.recipe.fp8_dpa or self.recipe.fp8_mha)


DISABLED = FP8Context(DelayedScaling(), enabled=False, outside=True)
"""The context of code outside every region."""


waiting: list[Callable[[], bool]] = []
"""Functions that are called when an enabled region begins, until they return True. Work that must wait until a model is
sharded is registered here. A region may begin on a single rank, so the functions must not run collectives."""

before_attention: list[Callable[[], bool]] = []
"""Functions that are called when a region begins whose recipe has FP8 attention. The function that attaches it to
unchanged models is registered here, and returns whether there are any."""


def current_context(own: FP8Context | None = None) -> FP8Context:
    """The context of this thread's innermost region; outside every region ``own``, a layer's, or :data:`DISABLED`."""
    context: FP8Context = thread.context or DISABLED
    return own if own is not None and context.outside else context


def num_enabled_regions() -> int:
    """The number of enabled regions that this thread has entered, but for those in compiled code."""
    return thread.num_enabled


def in_backward() -> bool:
    """Whether autograd is running on this thread, as it is while activation checkpointing recomputes a forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != NO_BACKWARD


def is_repeating() -> bool:
    """Whether a forward runs again inside a backward pass, and no region was entered there."""
    return in_backward() and thread.backward != torch._C._current_graph_task_id()


def context_of_forward(last: FP8Context | None, own: FP8Context | None = None) -> tuple[FP8Context, bool]:
    """The context of a layer's forward, and whether it runs inside a backward pass.

    Args:
        last: the context of the layer's last forward, which a recomputed forward uses.
        own: the layer's context outside of every region.
    """
    backward = torch._C._current_graph_task_id()
    if backward == NO_BACKWARD:
        return current_context(own), False
    return (last or current_context(own)) if thread.backward != backward else current_context(own), True


@contextmanager
def fp8_context(context: FP8Context) -> Iterator[None]:
    """Make ``context`` the current one.

    As a generator it is no frame that Dynamo compiles by itself: a region around compiled layers runs in Python.
    """
    compiling = torch.compiler.is_compiling()
    if context.enabled and not compiling:
        thread.num_enabled += 1
        if waiting:
            _call_waiting()
    previous, active = (thread.context, thread.backward), context.enabled or context.calibrating
    thread.context = context
    thread.backward = NO_BACKWARD if compiling else torch._C._current_graph_task_id()
    thread.active_regions += active
    thread.casts, thread.is_capturing = (), not compiling and is_capturing()
    try:
        yield
    finally:
        thread.casts, thread.is_capturing = (), False
        thread.context, thread.backward = previous
        thread.active_regions -= active


def own_forward_begins(context: FP8Context, history: AmaxHistory) -> None:
    """What entering a region does, where the layers of ``history`` begin a forward in their own ``context``."""
    thread.num_enabled += 1
    thread.casts = ()
    if waiting:
        _call_waiting()
    if context.attention:
        for prepare in before_attention:
            prepare()
    if isinstance(context.recipe, DelayedScaling):
        forwards_begin([history], torch.is_grad_enabled(), context.recipe.reduce_amax)


@torch.compiler.disable(reason="once for a model")
def _call_waiting() -> None:
    for each in tuple(waiting):
        if each():
            leave(waiting, each)  # another thread may have called it, too


class fp8_autocast(ContextDecorator):
    """Run FP8 modules in FP8 inside this region.

    Call ``backward()`` outside the region. A backward pass uses the context of its forward. Activation checkpointing
    recomputes a forward in the context of the layer's *last* forward, unless the recomputed function enters a region
    itself: a forward of the same layer in another context, between a checkpointed forward and its backward pass,
    changes the recomputation. Regions can be nested; the innermost one is used. Regions are thread-local.

    A function that ``torch.compile(fullgraph=True)`` compiles may contain a region. Before torch 2.13, its recipe must
    then be a name, None, or an object that was created outside the function; a mapping, or an object that is created
    inside, is not supported.

    A step of a ``torch.optim.Optimizer`` updates the delayed scales of the layers whose parameters it holds, from the
    amaxes since its last step. If no such optimizer steps, call ``update_fp8_scales(model)`` after each step; until
    then tensors are scaled by their current amaxes. If several recipes or groups are used between two steps, the last
    outermost region determines whether and over which group amaxes are reduced.

    Args:
        enabled: if False, modules run in high precision, also inside an enabled region.
        calibrating: with ``enabled=False``, collect the amaxes of inputs, weights and gradients; leaving the
            outermost calibrating region turns them into scales.
        fp8_recipe: a recipe or anything :func:`make_recipe` accepts; ``None`` is ``DelayedScaling()``.
        fp8_group: the process group whose ranks share their scales; ``None`` is all ranks.

    Raises:
        ValueError, TypeError: If ``fp8_recipe`` is not a recipe; see :func:`make_recipe`.
        TypeError: If ``enabled`` or ``calibrating`` is not a bool, or ``fp8_group`` not a process group.
    """

    _of_recipe, _of_group = "fp8_recipe", "fp8_group"

    @naming_arguments
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Any = None,
        fp8_group: dist.ProcessGroup | None = None,
    ) -> None:
        enabled = plain(enabled)
        calibrating = plain(calibrating)
        self._check_arguments(enabled, calibrating, fp8_group)
        recipe = make_recipe("delayed" if fp8_recipe is None else fp8_recipe)
        self.context = FP8Context(recipe, enabled, calibrating, fp8_group)
        self._attends = self.context.attention
        self._observed: DelayedScaling | None = None  # the recipe by which amaxes may be observed
        if isinstance(recipe, DelayedScaling) and (enabled or calibrating):
            self._observed = recipe
        self._regions: list[Any] = []
        self._reaches_attention = False

    def _recreate_cm(self) -> fp8_autocast:
        """Each call of a decorated function has its own region, because several threads may call it."""
        region = copy(self)
        region._regions = []
        return region

    def __enter__(self) -> fp8_autocast:
        outer: FP8Context | None = thread.context
        if self._attends and not torch.compiler.is_compiling():
            reached = [prepare() for prepare in before_attention]
            self._reaches_attention = any(reached)
        if self._observed is not None:
            recomputes = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != NO_BACKWARD
            outermost = not thread.active_regions and not recomputes
            region_begins(self._observed, self.context.group, outermost, training=torch.is_grad_enabled())
        evaluating = outer is not None and not outer.observe
        entered = fp8_context(replace(self.context, observe=False) if evaluating else self.context)
        entered.__enter__()
        self._regions.append(entered)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._regions.pop().__exit__(*exception)
        quiet = exception[0] is not None or self._reaches_attention or torch.compiler.is_compiling()
        if self.context.enabled and not quiet and not any_history():
            said = "ran nothing in FP8: the model has no FP8 layers; call convert_module(model) first"
            warnings.warn(f"{type(self).__name__} {said}", stacklevel=2)
        calibrated = not thread.active_regions and self.context.calibrating and exception[0] is None
        if calibrated and self._observed is not None:
            update_calibrated(self._observed, self.context.group)

    def _check_arguments(self, enabled: Any, calibrating: Any, group: Any) -> None:
        name = type(self).__name__
        if callable(enabled):
            raise TypeError(f"enabled={enabled!r} must be True or False; as a decorator write @{name}()")
        if not isinstance(enabled, bool):
            raise TypeError(
                f"enabled={enabled!r}, the first argument, must be True or False; a recipe is "
                f"{name}({self._of_recipe}={enabled!r})"
            )
        if not isinstance(calibrating, bool):
            raise TypeError(
                f"calibrating={calibrating!r}, the second argument, must be True or False, without quotes; a recipe is "
                f"{name}({self._of_recipe}=...)"
            )
        if group is not None and not _is_group(group):
            raise TypeError(
                f"{self._of_group}={group!r} must be a torch.distributed.ProcessGroup, or None for all ranks"
            )


class autocast(fp8_autocast):
    """:class:`fp8_autocast` with the names that its arguments have in Transformer Engine since 2.8.

    Args:
        enabled, calibrating: see :class:`fp8_autocast`.
        recipe: the argument ``fp8_recipe`` of :class:`fp8_autocast`.
        amax_reduction_group: the argument ``fp8_group`` of :class:`fp8_autocast`.
    """

    _of_recipe, _of_group = "recipe", "amax_reduction_group"

    @naming_arguments
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(enabled, calibrating, recipe, amax_reduction_group)


def _is_group(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
