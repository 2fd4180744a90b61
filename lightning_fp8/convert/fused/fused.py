"""Common code of modules of other libraries that run their forward in fewer passes."""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fp8 import fp8_region
from lightning_fp8.convert.fused.liger import is_patched
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.swap import swap_class, unsharded_class


class FusedModule(nn.Module):
    """A module whose forward takes fewer passes in an FP8 context. In any other it runs its own forward."""

    why_not: str | None = None
    """Why a training forward in an FP8 context was the module's own since observation started; empty if each one took
    fewer passes; None before the first one, and in compiled code."""
    called_otherwise: bool = False
    """Whether a forward in evaluation mode, or outside an FP8 context, ran since observation started."""
    own_context: FP8Context | None = None
    """As that of :class:`~lightning_fp8.modules.base.FP8Module`."""
    _last_context: FP8Context | None = None

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes that identify it in compiled code; see :mod:`lightning_fp8.traced`."""
        raise NotImplementedError

    def _fuses(self, why_not: Callable[[FP8Context], str]) -> bool:
        """Whether this forward takes fewer passes. A forward that a backward pass repeats has its context.

        Args:
            why_not: the reason in an FP8 context why it does not; an empty string if it does.
        """
        if torch.compiler.is_compiling():
            context = fp8_region.current_context(self.own_context)
            return context.enabled and not why_not(context)
        context, in_backward = fp8_region.context_of_forward(self._last_context, self.own_context)
        if not in_backward and self._last_context is not context:
            self._last_context = context  # setting a module's attribute is slow, so only a change is set
        reason = why_not(context) if context.enabled else ""
        if not (context.enabled and self.training):
            if not self.called_otherwise:
                self.called_otherwise = True
        elif not self.why_not and self.why_not != reason:
            self.why_not = reason
        return context.enabled and not reason

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class has no name in a Python module
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, unsharded_class(self).__bases__, {**reduced[2], "_last_context": None}, *reduced[3:]


def fused_class(fused: type, cls: type) -> type:
    """``cls`` with the base ``fused``.

    There is one while modules are of it. Python's list of subclasses is weak, so no cache keeps ``cls`` alive.
    """
    subclasses: list[type] = cls.__subclasses__()
    for made in subclasses:
        if made.__bases__ == (fused, cls):
            return made
    return type(cls.__name__, (fused, cls), {"__module__": cls.__module__})


def _new(fused: type, cls: type) -> Any:
    """An instance without attributes, for copies and pickles."""
    made: Any = fused_class(fused, cls)
    return made.__new__(made)


def fuse(module: nn.Module, fused: type[FusedModule]) -> None:
    """Add ``fused`` as a base before the class of ``module``, in place."""
    if not isinstance(module, fused):
        swap_class(module, fused_class(fused, unsharded_class(module)))
        module.why_not = None  # type: ignore[assignment]  # tells the module itself, if its class changes again
    if is_patched(module):  # the forward of its class computes the same
        del module.forward


def unfuse(module: nn.Module) -> None:
    """Undo :func:`fuse`, in place; it changes no other module."""
    if isinstance(module, FusedModule):
        swap_class(module, original_class(module))
        for name in ("why_not", "called_otherwise", "own_context", "_last_context", "_formula"):
            vars(module).pop(name, None)


def original_class(module: nn.Module) -> type:
    """The class of ``module`` without what this package adds."""
    cls = unsharded_class(module)
    return cls.__bases__[1] if issubclass(cls, FusedModule) else cls


def name_of(module: Any) -> str:
    """The class of ``module``, with its Python module, since several have a ``Qwen2MLP``; without it for torch's."""
    cls = unsharded_class(module)
    return cls.__name__ if cls.__module__.startswith("torch.") else f"{cls.__module__}.{cls.__name__}"


def computes(function: Any, *templates: Any) -> bool:
    """Whether ``function`` has the code of one of ``templates``: the same steps, whatever its variables are called.

    Subclasses and other libraries that copy a forward are recognized; a forward that was replaced or decorated is not.
    """
    code = getattr(function, "__code__", None)
    return code is not None and any(_steps(code) == _steps(template.__code__) for template in templates)


@lru_cache(maxsize=512)
def _steps(code: CodeType) -> tuple[Any, ...]:
    return tuple(_instructions(code)), code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0F


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Opcodes and arguments; constants as values, since a docstring shifts their numbers."""
    for each in dis.get_instructions(code):
        variables = re.findall("(?:LOAD|STORE)_FAST(?:_BORROW)?", each.opname)
        if each.arg is not None and len(variables) == 2:  # Python 3.13 combines two in one line of the source
            yield variables[0], each.arg >> 4
            yield variables[1], each.arg & 15
        elif each.opname not in ("RESUME", "NOP", "CACHE"):
            yield each.opname, each.argval if "CONST" in each.opname else each.arg


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks would see or change the input or output of a call of ``module``."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def why_not_input(x: Any) -> str:
    """The reason why an autograd function of this package cannot read ``x``; an empty string if it can."""
    if type(x) not in (Tensor, nn.Parameter):
        return f"its input is a {type(x).__name__}"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "FP8 layers do not support transforms of torch.func and forward-mode derivatives"
    return ""
