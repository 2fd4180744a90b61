"""Errors for names of other projects that do not exist here, when one of them is imported or read."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def answering(module: str, answer: Callable[[str], str | None]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module`` whose errors say what to use instead of a name.

    Args:
        answer: returns the sentence for a name of the other project, or None for a name that it does not have either.

    Raises (the function):
        ImportError: If the name is read by ``from module import name``, where Python drops the text of an
            AttributeError.
        AttributeError: If it is read otherwise, so that ``hasattr`` is False.
    """

    def __getattr__(name: str) -> Any:
        said = answer(name)
        if said is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        caller = sys._getframe(1)
        error = ImportError if caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM else AttributeError
        raise error(f"{name} is not supported: {said}")

    return __getattr__


def add_absent_modules(
    package: str, answers: Mapping[str, str], names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add modules to ``package`` that can be imported, and raise an error for every name.

    Args:
        answers: by the path of each module in ``package``, after that of its own package, what the error says.
        names: what it says of some names instead.
    """
    for path, answer in answers.items():
        answer_all(add_module(f"{package}.{path}", answer), answer, names)


def add_module(path: str, said: str, **values: Any) -> ModuleType:
    """Add a module to the package in which it is, with the docstring ``said`` and the names of ``values``."""
    parent, _, name = path.rpartition(".")
    made = sys.modules[path] = ModuleType(path, said)
    vars(made).update(values, __all__=[*values])
    setattr(sys.modules[parent], name, made)
    return made


def answer_all(module: ModuleType, answer: str, names: Mapping[str, str]) -> None:
    """Let ``module`` raise an error for every name that it does not have: that of ``names``, or ``answer``."""
    vars(module)["__getattr__"] = answering(
        module.__name__, lambda name: None if name.startswith("__") else names.get(name, answer)
    )
