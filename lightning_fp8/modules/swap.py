"""Swapping a module's class in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from lightning_fp8.modules.conv1d import fp8_conv1d


def unsharded_class(module: nn.Module) -> type:
    """The class of ``module`` without the mixin that ``fully_shard`` adds."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else type(module)


def swap_class(module: nn.Module, new: type) -> None:
    """Change the class of ``module`` to ``new``, and keep the mixin of ``fully_shard`` if it has one."""
    cls = type(module)
    sharded = unsharded_class(module) is not cls
    places = list(_places_of_own_forward(module))
    module.__class__ = type(cls.__name__, (cls.__bases__[0], new), {}) if sharded else new
    for put in places:
        put(MethodType(new.forward, module))  # type: ignore[attr-defined]


def calls_own_forward(module: nn.Module) -> bool:
    """Whether a ``forward`` that was assigned to the instance wraps the forward of its class.

    If so, swapping the class replaces the wrapped forward, too. transformers' tensor parallelism keeps it in a closure,
    its expert parallelism in an object in a closure, and accelerate's hooks keep it in ``_old_forward``.
    """
    return any(True for _ in _places_of_own_forward(module))


def _places_of_own_forward(module: nn.Module) -> Iterator[Callable[[Any], None]]:
    """A setter for each place that stores the bound forward of the class: attributes, closures, objects in closures."""
    own = getattr(unsharded_class(module), "forward", None)

    def is_own(value: Any) -> bool:
        return getattr(value, "__func__", None) is own and getattr(value, "__self__", None) is module

    attributes = vars(module)
    if is_own(attributes.get("_old_forward")):
        yield functools.partial(setattr, module, "_old_forward")
    todo, seen = [attributes.get("forward"), attributes.get("_old_forward")], set()
    while todo:
        function = todo.pop()
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, functools.partial):
            todo += [function.func, *function.args]
        places = [(function, name) for name in getattr(function, "__dict__", ())]
        places += [(cell, "cell_contents") for cell in getattr(function, "__closure__", None) or ()]
        for holder, name in places:
            try:
                value = getattr(holder, name)
            except ValueError:  # an empty cell
                continue
            if is_own(value):
                yield functools.partial(setattr, holder, name)
            elif callable(value) and not isinstance(value, (nn.Module, type)):
                todo.append(value)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is transformers' Conv1D. It does not import transformers."""
    cls = unsharded_class(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def swap_conv1d(module: nn.Module) -> None:
    """Change the class of transformers' Conv1D to its FP8 subclass, in place."""
    weight: Any = module.weight
    swap_class(module, fp8_conv1d(unsharded_class(module)))
    module.in_features, module.out_features = weight.shape  # type: ignore[assignment]
