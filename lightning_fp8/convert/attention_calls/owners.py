"""The modules that compute attention, which of them run it in FP8, and which did.

While a module's forward runs, its owner is on top of a thread-local stack, also under torch.compile and in the
recomputation of activation checkpointing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8.attention.modules.arguments import tell
from lightning_fp8.faster import AWAITED, NOT_TIMED, compared, least_keys
from lightning_fp8.fp8_region import DISABLED, FP8Context, current_context, in_backward
from lightning_fp8.modules.linear_layer import autocast_dtype
from lightning_fp8.modules.record import LayerRecord
from lightning_fp8.modules.swap import swap_class, unsharded_class
from lightning_fp8.threads import thread
from lightning_fp8.traced import note_traced

_ATTRIBUTE = "_fp8_attention"
SLOWER = "_fp8_attention_is_slower"
"""The attribute of a module that keeps what was decided for it while FP8 attention is detached."""
_FORMER = "_class_without_fp8_attention"


class Owner:
    """State of a module that computes attention.

    Attributes:
        cls: the name of its class, by which compiled code is recorded.
        fp8: False keeps its attention in high precision.
        record: counts of its attention calls.
        calls: forwards of the module, which may not call attention. Always 0 for transformers' modules in FP8.
        why: why the last call that should have run in FP8 did not.
        watched: whether ``why`` will be reported; otherwise a new one is warned about at once.
        comparison, slower, own_context: see :class:`~lightning_fp8.modules.base.FP8Module`.
    """

    def __init__(self, cls: str, fp8: bool, comparison: str | None = None, slower: str = "") -> None:
        self.cls, self.fp8 = cls, fp8
        self.comparison, self.slower = comparison, slower
        self.record = LayerRecord()
        self.calls = 0
        self.why = ""
        self.watched = False
        self.training = True
        self.own_context: FP8Context | None = None
        self.last_context: FP8Context | None = None
        self.ran_slower = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles, as for weight averaging, start anew: a context may hold a process group."""
        return Owner, (self.cls, self.fp8, self.comparison, self.slower), {"own_context": self.own_context}


copied: list[Callable[[nn.Module], None]] = []
"""Called with each copy, also an unpickled one, of a module that was attached."""
_nobody = Owner("", True)
"""Owner of calls outside all modules that are known to compute attention."""
_kept = Owner("", False)


def owner_of(module: nn.Module | None) -> Owner | None:
    """The owner of ``module``, if it is known to compute attention."""
    return getattr(module, _ATTRIBUTE, None)


def current_owner() -> Owner:
    """The innermost owner of this thread; a placeholder outside all owners."""
    return thread.owners[-1] if thread.owners else _nobody


@contextmanager
def in_high_precision() -> Iterator[None]:
    """Context in which attention runs in high precision."""
    thread.owners.append(_kept)
    try:
        yield
    finally:
        thread.owners.pop()


def own(module: nn.Module, owner: Owner, entered: bool) -> None:
    """Set the owner of ``module``; with ``entered``, also of all calls made while its forward runs."""
    setattr(module, _ATTRIBUTE, owner)
    if entered:
        swap_class(module, entering(unsharded_class(module)))  # type: ignore[arg-type]


def disown(reference: weakref.ref[nn.Module], owner: Owner) -> None:
    """Remove ``owner`` from a module, if it still is its owner."""
    if (module := reference()) is None or owner_of(module) is not owner:
        return
    delattr(module, _ATTRIBUTE)
    if (former := former_class(unsharded_class(module))) is not None:
        swap_class(module, former)


@cache
def entering(former: Any) -> Any:
    """A subclass of ``former`` whose forward makes the module's owner the current one.

    Hooks are not suitable: Dynamo recompiles for each module that has an always-called hook, and activation
    checkpointing ends a recomputation by an exception, which skips other hooks.
    """
    if former_class(former) is not None:
        return former

    class Entering(former):  # type: ignore[valid-type, misc]
        @wraps(former.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            owner = owner_of(self) or _nobody  # copies have no owner
            if not torch.compiler.is_compiling():
                owner.calls += not in_backward()
                owner.training = self.training
            thread.owners.append(owner)
            try:
                return super().forward(*args, **kwargs)
            finally:
                thread.owners.pop()

        def __reduce_ex__(self, protocol: Any) -> Any:  # copies and pickles; this class cannot be found by its name
            made, made_of, *rest = super().__reduce_ex__(protocol)
            return (_copy_of, (former,), *rest) if made_of == (type(self),) else (made, made_of, *rest)

    Entering.__name__, Entering.__qualname__ = former.__name__, former.__qualname__
    Entering.__module__, Entering.__doc__ = former.__module__, former.__doc__
    setattr(Entering, _FORMER, former)
    return Entering


def former_class(cls: type) -> type[nn.Module] | None:
    """The class that :func:`entering` derived ``cls`` from; None if it did not."""
    return vars(cls).get(_FORMER)


def _copy_of(former: Any) -> Any:
    cls = entering(former)
    made = cls.__new__(cls)
    for noted in copied:
        noted(made)
    return made


def runs_in_fp8(owner: Owner, why_not: Callable[[], str]) -> bool:
    """Whether a call of ``owner``, which is counted, runs in FP8: by the current context, or repeated by its forward's.

    ``why_not`` returns the reason why it cannot; empty if it can.
    """
    context, compiling, repeats = current_context(owner.own_context), torch.compiler.is_compiling(), in_backward()
    if repeats and (owner is not _nobody or context is DISABLED):
        context = owner.last_context or context
    elif not repeats and not compiling:
        owner.last_context, owner.ran_slower = context, bool(owner.slower)
    is_slower = owner.ran_slower if repeats else bool(owner.slower)
    wanted = owner.fp8 and context.attention and not is_slower
    reason = why_not() if wanted else ""
    if not repeats:
        if reason and (compiling or not (owner.watched or owner.why == reason)):
            tell(f"attention runs in high precision: {reason}")
        if not compiling:
            owner.record.note(wanted and not reason, owner.training)
            owner.why = reason or owner.why
    return wanted and not reason


def compare(owner: Owner, q: Tensor, k: Tensor, causal: bool, plain: bool = True) -> None:
    """Compare FP8 with SDPA for the sizes of ``[..., H, L, D]`` tensors, at the first training call of ``owner``.

    Compiled attention is not compared. ``plain``: whether there are no windows and no padding, for which nothing was
    timed.
    """
    if torch.compiler.is_compiling():
        note_traced(owner.cls)
    elif owner.comparison == AWAITED and owner.training:
        limit: tuple[float, str] = 0, NOT_TIMED
        if plain:
            dtype, shared = autocast_dtype(q.device.type) or q.dtype, q.dim() > 3 and q.shape[-3] != k.shape[-3]
            limit = least_keys(q.device, dtype, q.shape[-1], causal, shared)
        owner.comparison = compared(*limit, k.shape[-2])
