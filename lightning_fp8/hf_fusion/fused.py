"""Common code of modules of other libraries that run their forward in fewer passes."""

from __future__ import annotations

import copyreg
import dis
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lightning_fp8 import fp8_region
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.modules.swap import swap_class, unsharded_class


class FusedModule(nn.Module):
    """A module whose forward takes fewer passes in an FP8 context. In any other it runs its own forward."""

    fused: bool | None = None
    """Whether all training forwards in an FP8 context took fewer passes; None before the first one."""
    _last_context: FP8Context | None = None
    _own_forward: FunctionType | None = None
    """The known forward that was assigned to the instance, as by Liger's patch; None for that of its class."""

    def _context(self) -> FP8Context:
        """The context of this forward; recomputation in a backward pass repeats that of the last one."""
        if torch.compiler.is_compiling():
            return fp8_region.current_context()
        context, in_backward = fp8_region.context_of_forward(self._last_context)
        if not in_backward and self._last_context is not context:
            self._last_context = context  # setting a module's attribute is slow, so only a change is set
        return context

    def _unfused(self, x: Any) -> Any:
        """Its own forward."""
        own = self._own_forward
        return super().forward(x) if own is None else own(self, x)  # type: ignore[misc]

    def _note(self, fused: bool) -> None:
        if self.training and self.fused is not fused and self.fused is not False and not torch.compiler.is_compiling():
            self.fused = fused

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last_context"}


class FusedClass(type):
    """The type of the classes of :func:`fused_class`, which have no name in a module: they are pickled as calls."""


@lru_cache
def fused_class(fused: type, cls: type) -> type:
    """``cls`` with the base ``fused``."""
    return FusedClass(cls.__name__, (fused, cls), {"__module__": cls.__module__, "_made_of": (fused, cls)})


copyreg.pickle(FusedClass, lambda cls: (fused_class, cls._made_of))  # type: ignore[arg-type, attr-defined]


def fuse(module: nn.Module, fused: type) -> None:
    """Add ``fused`` as a base before the class of ``module``, in place."""
    if not isinstance(module, fused):
        swap_class(module, fused_class(fused, unsharded_class(module)))
    if "forward" in vars(module):  # a known one
        own = forward_of(module)
        del module.forward
        module._own_forward = own


def original_class(module: nn.Module) -> type:
    """The class of ``module`` without what this package adds."""
    cls = unsharded_class(module)
    return cls._made_of[1] if isinstance(cls, FusedClass) else cls  # type: ignore[attr-defined, no-any-return]


def forward_of(module: nn.Module) -> Any:
    """The function that a call of ``module`` runs, without what this package adds: of the instance or of its class."""
    own = vars(module).get("forward") or vars(module).get("_own_forward")
    if own is None:
        return original_class(module).forward  # type: ignore[attr-defined]
    return own.__func__ if getattr(own, "__self__", None) is module else own


def computes(function: Any, *templates: FunctionType) -> bool:
    """Whether ``function`` has the code of one of ``templates``: the same steps, whatever its variables are called.

    Subclasses and other libraries that copy a forward are recognized; a forward that was replaced or decorated is not.
    """
    code = getattr(function, "__code__", None)
    return code is not None and any(_steps(code) == _steps(template.__code__) for template in templates)


@lru_cache(maxsize=512)
def _steps(code: CodeType) -> tuple[Any, ...]:
    return tuple(_instructions(code)), code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0x0F


def _instructions(code: CodeType) -> Any:
    """Opcodes and arguments; constants as values, since a docstring shifts their numbers."""
    for each in dis.get_instructions(code):
        if each.opname in ("RESUME", "NOP", "CACHE"):
            continue
        argument = each.argval if "CONST" in each.opname else each.arg
        yield each.opname, argument


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks would see or change the input or output of a call of ``module``."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether hooks see the calls of all modules."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def in_transform() -> bool:
    """Whether torch.func transforms or forward-mode derivatives are active, which FP8 layers do not support."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
