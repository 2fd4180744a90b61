"""The fingerprint of a kernel, a text of all that it is compiled from: another text, another kernel.

A kernel is a function that calls others, which were put together from options: the functions of a source of values,
of an epilogue, instructions as PTX. All that it reaches counts, wherever it is written; nothing else does, so that an
edit of host code compiles nothing again. Of modules that know LLVM, whose functions are not looked into, the files
count, and those of all modules of this package that they import.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from cuda_kernels.device.language import Cuda, Device, Instruction, Lowered, Type, UniTuple
from cuda_kernels.references import references

_ROOT = Path(__file__).parents[1]


def fingerprint(word: Any) -> str:
    """A text that differs where the machine code made of ``word`` may; the same for every Python and NumPy.

    Args:
        word: a function of kernel code, or what one names.

    Raises:
        TypeError: it is nothing that kernel code may name.
    """
    return _text_of(word, _source_of)


def code_fingerprint(word: Any) -> str:
    """The same of the bytecode that runs.

    A file may have been edited since it was imported, and Numba does not read it.
    """
    return _text_of(word, _bytecode_of)


def _text_of(word: Any, code_text: Callable[[CodeType], str]) -> str:
    if isinstance(word, Device):
        return _of_function(word.function, code_text)
    if isinstance(word, FunctionType):
        return _of_function(word, code_text)
    if isinstance(word, Instruction):
        return repr((word.template, word.result, word.operands, word.pure))
    if isinstance(word, Lowered):
        return f"{word} {source_of_module(word.module)}"
    if isinstance(word, tuple) and not hasattr(word, "_fields"):  # names of fields are not in their values
        return f"({', '.join(_text_of(each, code_text) for each in word)})"
    if isinstance(word, np.generic):  # whose own text is another with each NumPy
        return f"{type(word).__name__} {word.item()!r}"
    if isinstance(word, (bool, int, float, str, Type, UniTuple, type(None))):
        return f"{type(word).__name__} {word!r}"
    if word is np:
        return "numpy"
    if isinstance(word, Cuda):
        return "cuda"
    raise TypeError(
        f"kernel code names {word!r}; it may name numbers, tuples, numpy, and the words of cuda_kernels.device.language"
    )


@cache
def _of_function(function: FunctionType, code_text: Callable[[CodeType], str]) -> str:
    named = (f"{name} = {_text_of(value, code_text)}" for name, value in references(function).items())
    defaults = _text_of(function.__defaults__, code_text)
    text = "\n".join((code_text(function.__code__), defaults, *named))
    return f"{function.__qualname__} {hashlib.sha256(text.encode()).hexdigest()}"


@cache
def _source_of(code: CodeType) -> str:
    return inspect.getsource(code)


def _bytecode_of(code: CodeType) -> str:
    constants = (_bytecode_of(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return " ".join((code.co_code.hex(), *code.co_names, *code.co_varnames, *constants))


@cache
def source_of_module(name: str) -> str:
    """A hash of a module's file and of those of this package that it imports, found without importing them."""
    sources = {each: _file_of(each).read_bytes() for each in sorted(_with_imports(name))}
    text = " ".join(f"{each} {hashlib.sha256(source).hexdigest()}" for each, source in sources.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _with_imports(name: str) -> set[str]:
    """A module and all of this package that it imports, and these import."""
    found: set[str] = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += _imported_by(module)
    return found


def _imported_by(name: str) -> Iterator[str]:
    """The modules of this package that a module imports, at its beginning or inside of functions."""
    for node in ast.walk(ast.parse(_file_of(name).read_bytes())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{name} imports by a relative name"
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (each for each in named if each.split(".")[0] == _ROOT.name and _file_of(each).exists())


def _file_of(module: str) -> Path:
    """The file of a module of this package; its parents are not imported for it."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
