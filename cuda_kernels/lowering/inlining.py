"""Numba's inliner, which gives the same code in less time.

Caches the IR of each inlined function and copies it once per call. Numba copies it twice, and deep-copies the scope
with every block. Kernel code is small functions, inlined hundreds of times, and Numba interprets a function's bytecode
again for each call, with all that it calls in turn: kernels of gated activations' gradients spent nine tenths of their
compilation there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any

from numba.cuda.core import inline_closurecall, ir

_NumbasInliner = inline_closurecall.InlineWorker
_KNOWN = {
    "run_untyped_passes": ["self", "func", "enable_ssa"],
    "inline_ir": ["self", "caller_ir", "block", "i", "callee_ir", "callee_freevars", "arg_typs"],
}
for _method, _parameters in _KNOWN.items():
    if list(signature(getattr(_NumbasInliner, _method, lambda: None)).parameters) != _parameters:
        raise ImportError(f"Numba-CUDA's InlineWorker.{_method} is another than that of its versions 0.24 to 0.30")

_INTERPRETED = "functions_interpreted_for_inlining"
"""An attribute of Numba's pipeline, of which each compilation has its own."""


class _OneScope(ir.Scope):  # type: ignore[misc]
    """The scope of all blocks of a function, which stays the same one where a block is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneScope:
        return self


class _OneBlock(ir.Block):  # type: ignore[misc]
    """A block of a function that is inlined, which was copied already."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneBlock:
        return self


class Inliner(_NumbasInliner):  # type: ignore[misc, valid-type]
    """Interprets each function once in a compilation, and copies it and its scope once for each call."""

    def run_untyped_passes(self, func: FunctionType, enable_ssa: bool = False) -> Any:
        interpreted = self.pipeline.__dict__.setdefault(_INTERPRETED, {})
        if (func, enable_ssa) not in interpreted:
            interpreted[func, enable_ssa] = super().run_untyped_passes(func, enable_ssa)
        self.flags.enable_ssa = enable_ssa  # as Numba's own leaves it
        return interpreted[func, enable_ssa]

    def inline_ir(self, caller_ir: Any, block: Any, i: int, callee_ir: Any, *args: Any, **options: Any) -> Any:
        """As Numba's, which returns four values; the first, the callee as it was, is here what became of it."""
        copied = _copied(callee_ir)
        result = super().inline_ir(caller_ir, block, i, copied, *args, **options)
        for inlined in caller_ir.blocks.values():
            if type(inlined) is _OneBlock:
                inlined.__class__ = ir.Block  # a caller is copied where it is inlined in turn
        return result


def _copied(function: Any) -> Any:
    """A copy of a function's representation; its blocks share one scope, as its own do, and are not copied again."""
    made = function.copy()
    made.blocks = copy.deepcopy(function.blocks)
    for block in made.blocks.values():
        block.scope.__class__ = _OneScope
        block.__class__ = _OneBlock
    return made


@contextmanager
def fast_inlining() -> Iterator[None]:
    """Context manager that installs this inliner."""
    inline_closurecall.InlineWorker = Inliner
    try:
        yield
    finally:
        inline_closurecall.InlineWorker = _NumbasInliner
