"""Compilation of kernels to machine code, and the keys under which it is cached.

| machine code comes from | |
|---|---|
| the kernel's handle, if loaded on this device before | ``Kernel.loaded``, read first by a launch |
| the folder of prebuilt kernels | :func:`cubin`; files: ``host/cache_folder.py`` |
| the cache in memory, or its folder | :func:`built`; files: ``host/cache_folder.py`` |
| Numba, which compiles to LTO-IR, and nvJitLink, which links it | ``lowering/compiler.py``: ``ltoir``, ``link`` |

The cache is the folder ``~/.cache/lightning_fp8``, or ``LIGHTNING_FP8_CACHE``. A file's name is its key, a hash of all
that its machine code depends on. Changed sources have new keys, so files never have to be deleted. :func:`source_key`
hashes the kernel's :func:`fingerprint`, parameters, bounds and architecture, and identifies prebuilt kernels;
:func:`cache_key` adds the versions of the compilers. ``host/precompile.py`` can fill the cache before the first launch,
and ``lightning-fp8 kernels build`` a folder for other machines.

A fingerprint is a text of everything that a kernel is compiled from. A kernel is a function that calls others, which
are assembled from options: the functions of a loader or an epilogue, and PTX instructions. Everything that it reaches
is included, wherever it is defined, and nothing else, so that edits of host code do not recompile kernels. Modules that
generate LLVM IR are not analysed; their files are included, with those of all modules of this package they import.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from cuda_kernels.device.language import Cuda, Device, Instruction, Lowered, Type, UniTuple
from cuda_kernels.host.cache_folder import cached, carried, is_cached, is_carried
from cuda_kernels.host.toolchain import TOOLS, versions
from cuda_kernels.kernel import Kernel, KernelError
from cuda_kernels.references import references

_ROOT = Path(__file__).parents[1]

_TENSOR_MAP_BYTES = 128


def is_compiled(kernel: Kernel, arch: str) -> bool:
    """Whether :func:`cubin` finds machine code of ``kernel`` for ``arch``; its file may be damaged."""
    return is_carried(source_key(kernel, "cubin", arch)) or is_cached(cache_key(kernel, "cubin", arch))


def cubin(kernel: Kernel, arch: str) -> bytes:
    """Machine code of ``kernel`` for ``arch``: prebuilt, or from :func:`built`.

    Raises:
        KernelError: See :func:`built`.
        ImportError: If it must be compiled, and a compiler is missing.
    """
    _check(kernel, arch)
    code = carried(source_key(kernel, "cubin", arch), f"{kernel.name} for sm_{arch}")
    return code if code is not None else built(kernel, arch)


def built(kernel: Kernel, arch: str) -> bytes:
    """Machine code of ``kernel`` for ``arch``, from the cache or compiled here and cached.

    Raises:
        KernelError: If the kernel does not support ``arch``, or its machine code cannot be launched correctly.
        ImportError: If a compiler is missing.
    """
    _check(kernel, arch)
    return cached(cache_key(kernel, "cubin", arch), lambda: _compiled(kernel, arch))


def _check(kernel: Kernel, arch: str) -> None:
    if arch not in kernel.architectures:
        raise KernelError(f"{kernel.name} is for sm_{', sm_'.join(kernel.architectures)}, not for sm_{arch}")


def _compiled(kernel: Kernel, arch: str) -> bytes:
    from cuda_kernels.lowering import compiler

    code, report = compiler.link(compiler.ltoir(kernel, arch), arch, "cubin")
    # If the annotations of by-value tensor maps are lost, the kernel copies them to its stack, and TMA reads from an
    # invalid address. Spilled registers, which are in the frame too, only take time.
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    copied = max(int(frame) - int(spilled) for frame, spilled in frames)
    if "tensor_map" in kernel.parameter_kinds and copied >= _TENSOR_MAP_BYTES:
        raise KernelError(f"{kernel.name}, compiled for sm_{arch}, does not read its tensor maps in place: {report}")
    return code


# --- Keys -------------------------------------------------------------------------------------------------------------


def cache_key(kernel: Kernel, what: str, arch: str) -> str:
    """The cache key of this kernel's artifact of kind ``what``; depends on the source and the compilers."""
    return _hashed(f"{source_key(kernel, what, arch)} {code_fingerprint(kernel.function)} {compilers()}")


def source_key(kernel: Kernel, what: str, arch: str) -> str:
    """The part of the key that does not depend on the compilers."""
    bounds = (
        kernel.parameters,
        kernel.threads,
        kernel.min_blocks_on(arch),
        source_hash("cuda_kernels.lowering.compiler"),
    )
    return _hashed(f"{what} {arch} {kernel.name} {bounds} {fingerprint(kernel.function)}")


@cache
def compilers() -> str:
    """The versions of everything that compiles a kernel's source to machine code, found without importing it.

    These are numba-cuda, Numba, llvmlite, cuda-core, libnvvm and nvJitLink: :data:`~cuda_kernels.host.toolchain.TOOLS`.
    """
    installed = versions(TOOLS)
    text = " ".join(f"{tool} {version}" for tool, version in installed.items())
    return text if {"nvidia-nvvm", "nvidia-nvjitlink"} <= installed.keys() else f"{text} {_toolkits()}"


def _toolkits() -> str:
    """Folders of compilers that are not packages, and the contents of their version files."""
    places = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if os.environ.get(name)]
    versions_of = [path.read_text() for place in places if (path := Path(place, "version.json")).is_file()]
    return " ".join((*places, *versions_of))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- Fingerprints of kernels ------------------------------------------------------------------------------------------


def fingerprint(word: Any) -> str:
    """A text that differs if machine code made of ``word`` may differ; the same for all versions of Python and NumPy.

    Args:
        word: a function of kernel code, or a value that one refers to.

    Raises:
        TypeError: If kernel code cannot refer to such a value.
    """
    return _text_of(word, _source_of)


def code_fingerprint(word: Any) -> str:
    """The fingerprint of the bytecode.

    Numba compiles the bytecode; the file may have been edited since it was imported.
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
        return f"{word} {source_hash(word.module_name)}"
    if isinstance(word, tuple) and not hasattr(word, "_fields"):  # field names are not part of the values
        return f"({', '.join(_text_of(part, code_text) for part in word)})"
    if isinstance(word, np.generic):  # its repr depends on NumPy's version
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
    return f"{function.__qualname__} {_hashed(text)}"


@cache
def _source_of(code: CodeType) -> str:
    return inspect.getsource(code)


def _bytecode_of(code: CodeType) -> str:
    constants = (
        _bytecode_of(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts
    )
    return " ".join((code.co_code.hex(), *code.co_names, *code.co_varnames, *constants))


@cache
def source_hash(module_name: str) -> str:
    """A hash of a module's file and of the modules of this package it imports, found without importing them."""
    sources = {imported: _file_of(imported).read_bytes() for imported in sorted(_with_imports(module_name))}
    return _hashed(" ".join(f"{imported} {hashlib.sha256(source).hexdigest()}" for imported, source in sources.items()))


def _with_imports(module_name: str) -> set[str]:
    """A module and all modules of this package that it imports, directly or indirectly."""
    modules: set[str] = set()
    todo = [module_name]
    while todo:
        imported = todo.pop()
        if imported not in modules:
            modules.add(imported)
            todo += _imported_by(imported)
    return modules


def _imported_by(module_name: str) -> Iterator[str]:
    """The modules of this package that a module imports, at top level or in functions."""
    for node in ast.walk(ast.parse(_file_of(module_name).read_bytes())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{module_name} imports by a relative name"
            named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (
            module_name
            for module_name in named
            if module_name.split(".")[0] == _ROOT.name and _file_of(module_name).exists()
        )


def _file_of(module_name: str) -> Path:
    """The file of a module of this package, found without importing its parents."""
    path = _ROOT.joinpath(*module_name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
