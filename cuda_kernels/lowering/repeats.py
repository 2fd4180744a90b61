"""Memoizes call resolution and skips unused liveness analysis in Numba. The generated code does not change.

Type inference resolves each call three times, and lowering once more. The result depends on the function and the types
of the arguments alone, and kernel code has few functions and few types: four of five calls were resolved before. After
each pass, and for each function that it inlines, Numba also finds the variables that are live where a block begins,
which only generators need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from numba.cuda import types
from numba.cuda.core import postproc, transforms

_Callable = next(base for base in types.Function.__mro__ if "get_call_type" in vars(base))
_Processor = postproc.PostProcessor
_NUMBAS_CALL_TYPE, _NUMBAS_RUN = _Callable.get_call_type, _Processor.run

for _function, _parameters in (
    (_NUMBAS_CALL_TYPE, ["self", "context", "args", "kws"]),
    (_NUMBAS_RUN, ["self", "emit_dels", "extend_lifetimes"]),
):
    if list(signature(_function).parameters) != _parameters:
        raise ImportError(f"Numba-CUDA's {_function.__qualname__} is another than that of its versions 0.24 to 0.30")


def _run(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
    """As Numba's, without the variables that are live at the entry of each block; others are computed lazily."""
    function = self.func_ir
    if function.is_generator:
        _NUMBAS_RUN(self, emit_dels, extend_lifetimes)
        return
    function.blocks = transforms.canonicalize_cfg(function.blocks)
    function.variable_lifetime = postproc.VariableLifetime(function.blocks)
    function.generator_info = None
    if emit_dels:
        self._insert_var_dels(extend_lifetimes=extend_lifetimes)


@contextmanager
def fewer_repeats() -> Iterator[None]:
    """Context manager that installs both changes; resolved calls are kept until it ends."""
    known: dict[Any, Any] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: dict[str, Any]) -> Any:
        key = self, context, tuple(args), tuple(kws.items())
        if key not in known:
            known[key] = _NUMBAS_CALL_TYPE(self, context, args, kws)
        return known[key]

    _Callable.get_call_type, _Processor.run = get_call_type, _run
    try:
        yield
    finally:
        _Callable.get_call_type, _Processor.run = _NUMBAS_CALL_TYPE, _NUMBAS_RUN
