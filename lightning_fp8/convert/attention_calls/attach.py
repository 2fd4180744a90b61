"""Attach FP8 attention to unchanged models, and detach it again."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_fp8 import fp8_region
from lightning_fp8.attention.modules.arguments import said
from lightning_fp8.convert.attention_calls import owners, sdpa
from lightning_fp8.convert.attention_calls.owners import Owner
from lightning_fp8.faster import AWAITED
from lightning_fp8.names import clean_name


class AttentionPlace(NamedTuple):
    """A module that computes attention, or a block whose attention was not found.

    Attributes:
        name: the module's name in its model.
        fp8: whether its attention runs in FP8.
        hf_config: the transformers configuration that selects its attention function; None if it calls torch's.
        compares: whether its first training call is compared with SDPA.
    """

    name: str
    fp8: bool
    hf_config: Any = None
    compares: bool = False


_prepared: weakref.WeakKeyDictionary[nn.Module, Sequence[AttentionPlace]] = weakref.WeakKeyDictionary()
_attached: weakref.WeakKeyDictionary[nn.Module, list[Callable[[], object]]] = weakref.WeakKeyDictionary()
_copies: weakref.WeakSet[Any] = weakref.WeakSet()
"""Copies of attached modules, also unpickled ones."""
_lock = threading.RLock()


def prepare(model: nn.Module, places: Sequence[AttentionPlace]) -> None:
    """Record where ``model`` computes attention, for :func:`attach`. The model is not changed yet."""
    with _lock:
        was_attached = model in _attached
        if was_attached and [*map(_key, _prepared[model])] == [*map(_key, places)]:
            return
        detach(model)
        _prepared[model] = places
        if was_attached:
            attach(model)


def _key(place: AttentionPlace) -> tuple[Any, ...]:
    return place._replace(hf_config=id(place.hf_config))


def attach(model: nn.Module) -> None:
    """Let FP8 contexts apply to the attention of a prepared ``model``. No effect if already attached, or on a copy."""
    with _lock:
        if model in _attached or model not in _prepared:
            return
        said.clear()
        modules = {clean_name(name): module for name, module in model.named_modules()}
        undo: list[Callable[[], object]] = []
        for place in _prepared[model]:
            if (module := modules.get(place.name)) is None:  # it was removed since the conversion
                continue
            slower = getattr(module, owners.SLOWER, None)
            compared = ("" if slower is not None else AWAITED, slower or "") if place.compares else (None, "")
            owner = Owner(type(module).__qualname__, place.fp8, *compared)
            if (former := owners.owner_of(module)) is not None:  # of a part that was converted by itself
                owner.own_context = former.own_context
            # high-precision attention stays so if the configuration is switched back to torch's function
            owners.own(module, owner, entered=place.hf_config is None or not place.fp8)
            undo.append(partial(owners.disown, weakref.ref(module), owner))
        configs = {id(place.hf_config): place.hf_config for place in _prepared[model] if place.hf_config is not None}
        undo += [_switched(hf_config) for hf_config in configs.values()]
        # Weak references call back newest first: the model must be out of ``_attached`` when this one is called.
        finalizer = weakref.finalize(model, _uninstall_if_unused)
        finalizer.atexit = False
        _attached[model] = [*undo, finalizer.detach]
        sdpa.install()


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    with _lock:
        for undo in reversed(_attached.pop(model, [])):
            undo()
        _uninstall_if_unused()


def attach_prepared() -> bool:
    """:func:`attach` every prepared model, on entering a region with FP8 attention.

    It returns whether there are any, or copies of some.
    """
    if len(_attached) < len(_prepared):
        for model in list(_prepared):
            attach(model)
    if not _attached and _copies:  # their models are gone
        sdpa.install()
    return bool(_attached or _copies)


def note_copy(module: Any) -> None:
    """Note that ``module`` is a copy of one that was attached, and may outlive its model."""
    _copies.add(module)
    weakref.finalize(module, _uninstall_if_unused).atexit = False


def note_unpickled(lives: Any) -> None:
    """Let attention of an unpickled model run in FP8 in this process, which may have attached none, while it lives."""
    note_copy(lives)
    sdpa.install()
    if "transformers.modeling_utils" in sys.modules:
        from lightning_fp8.convert.attention_calls import hf  # noqa: F401 - registers the function of configurations


fp8_region.before_attention.append(attach_prepared)
owners.copied.append(note_copy)


def _uninstall_if_unused() -> None:
    if not _attached:
        sdpa.uninstall()


def _switched(hf_config: Any) -> Callable[[], None]:
    """Make modules of ``hf_config`` call our attention; returns a function that switches back."""
    from lightning_fp8.convert.attention_calls import hf

    former = hf_config._attn_implementation_internal
    hf_config._attn_implementation_internal = hf.NAME

    def back() -> None:
        if hf_config._attn_implementation_internal == hf.NAME:
            hf_config._attn_implementation_internal = former

    return back
