"""The global and closed-over values that a function refers to."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FunctionType
from typing import Any


def references(function: FunctionType) -> dict[str, Any]:
    """The values of ``function``'s global and free variables by name, without Python's builtins (``range``, ...)."""
    code, scope = function.__code__, function.__globals__
    found = {name: scope[name] for name in _global_names(code) if name in scope}
    cells = zip(code.co_freevars, function.__closure__ or ())
    return found | {name: cell.cell_contents for name, cell in cells}


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Global names in ``code`` and its nested functions, sorted."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(sorted(names.union(*map(_global_names, inner))))
