"""Compiled kernels on disk, under a hash of what they were made of."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CACHE_VARIABLE = "LIGHTNING_FP8_CACHE"
"""Environment variable: the folder of compiled kernels, instead of ``~/.cache/lightning_fp8``."""

_TOOLS = ("numba-cuda", "numba", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")


@cache
def toolchain(module: str) -> str:
    """A hash of what kernels of ``module`` depend on: its source, those it imports, and the compilers' versions."""
    hashed = hashlib.sha256()
    for path in sorted(_sources(module)):
        hashed.update(path.read_bytes())
    for tool in _TOOLS:
        try:
            hashed.update(f"{tool} {version(tool)};".encode())
        except PackageNotFoundError:
            hashed.update(f"{tool} -;".encode())
    return hashed.hexdigest()


def _sources(module: str) -> set[Path]:
    """The files of ``module`` and of all modules of this package that it imports."""
    found: set[Path] = set()
    todo = [module]
    while todo:
        path = Path(__file__).parent.parent.joinpath(*todo.pop().split(".")).with_suffix(".py")
        if path not in found and path.exists():
            found.add(path)
            todo += re.findall(r"^(?:from|import) (cuda_kernels[.\w]+)", path.read_text(), re.MULTILINE)
    return found


_memory: dict[str, bytes] = {}


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightning_fp8")


def cached(key: str, build: Callable[[], bytes]) -> bytes:
    """The bytes under ``key``, or those of ``build``, which are then kept.

    Processes may start at once: each writes a file of its own and renames it. A damaged file is built again. Where the
    folder cannot be written, one warning says so and the bytes live as long as the process.
    """
    if key in _memory:
        return _memory[key]
    path = cache_folder() / key
    try:
        digest, code = path.read_bytes()[:32], path.read_bytes()[32:]
    except OSError:
        digest, code = b"", b""
    if not code or hashlib.sha256(code).digest() != digest:
        code = build()
        _write(path, hashlib.sha256(code).digest() + code)
    _memory[key] = code
    return code


def is_cached(key: str) -> bool:
    """Whether something is kept under ``key``; it may be damaged."""
    return key in _memory or (cache_folder() / key).exists()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        _warn_once(
            f"compiled FP8 kernels cannot be kept in {path.parent} ({error.strerror}) and are compiled again by each"
            f" process; set {CACHE_VARIABLE} to a folder that can be written"
        )


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
