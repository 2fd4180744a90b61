"""What a kernel is compiled from, as text: another text, another kernel.

A kernel is a function that calls others, which were put together from options: the functions of a source of values,
of an epilogue, instructions as PTX. All that it reaches counts, wherever it is written; nothing else does, so that an
edit of host code compiles nothing again.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from cuda_kernels.device.language import Cuda, Device, Instruction, Lowered, Type, UniTuple
from cuda_kernels.references import references


def fingerprint(word: Any) -> str:
    """A text that differs where the machine code made of ``word`` may; the same for every Python and NumPy.

    Args:
        word: a function of kernel code, or what one names.

    Raises:
        TypeError: it is nothing that kernel code may name.
    """
    return _text_of(word, _source_of)


def code_fingerprint(word: Any) -> str:
    """The same of the code that runs: a file may have been edited since it was imported, and Numba does not read it."""
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
    if isinstance(word, tuple):
        return f"({', '.join(_text_of(each, code_text) for each in word)})"
    if isinstance(word, np.generic):  # whose own text is another with each NumPy
        return f"{type(word).__name__} {word.item()!r}"
    if isinstance(word, (bool, int, float, str, Type, UniTuple, type(None))):
        return f"{type(word).__name__} {word!r}"
    if isinstance(word, (ModuleType, type)):
        return word.__name__
    if isinstance(word, Cuda):
        return "cuda"
    raise TypeError(
        f"kernel code names {word!r}; it may name numbers, tuples, and the words of cuda_kernels.device.language"
    )


@cache
def _of_function(function: FunctionType, code_text: Callable[[CodeType], str]) -> str:
    named = (f"{name} = {_text_of(value, code_text)}" for name, value in references(function).items())
    text = "\n".join((code_text(function.__code__), repr(function.__defaults__), *named))
    return f"{function.__qualname__} {hashlib.sha256(text.encode()).hexdigest()}"


@cache
def _source_of(code: CodeType) -> str:
    return inspect.getsource(code)


def _bytecode_of(code: CodeType) -> str:
    constants = (_bytecode_of(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return " ".join((code.co_code.hex(), *code.co_names, *code.co_varnames, *constants))


@cache
def source_of_module(name: str) -> str:
    """A hash of a module's file, found without importing it."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
