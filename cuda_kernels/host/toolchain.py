"""Versions of the compilers, from their packages' metadata: importing them would take seconds.

Compatibility is taken from the packages' own sources: numba's ``__init__`` for numpy, nvJitLink's error for libnvvm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

TOOLS = (
    "numba-cuda", "numba", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc",
    "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12",
)  # fmt: skip
"""Packages that a kernel's machine code depends on. libnvvm is in CUDA 12's nvcc wheel, and has its own in CUDA 13."""

COMPANIONS = ("numpy", "cuda-bindings", "cuda-pathfinder")
"""Packages whose versions must be compatible with these."""

_NEWEST_NUMPY = {
    (0, 60): (2, 0),
    (0, 61): (2, 1),
    (0, 61, 2): (2, 2),
    (0, 62): (2, 3),
    (0, 64): (2, 4),
    (0, 67): (2, 5),
}
"""The newest numpy that numba can be imported with, from this version of numba on."""

_NUMBA_READ = (0, 69)
"""The first version of numba that was not checked for its limit on numpy."""

Versions = Mapping[str, str]


def install(extra: str) -> str:
    """The command that installs lightning-fp8 with the requirements of ``extra``; there is no release yet."""
    return f'pip install -e ".[{extra}]" in the checkout of lightning-fp8'


def install_compilers(cuda: str | None) -> str:
    """The command that installs compilers and bindings for the CUDA version that torch is built for."""
    return install("cuda12" if cuda and cuda.startswith("12.") else "cuda")


class Conflict(NamedTuple):
    """Incompatible versions: ``problem`` is a sentence without a period, ``way_out`` a command."""

    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.way_out}"


def versions(names: Iterable[str] = (*TOOLS, *COMPANIONS)) -> dict[str, str]:
    """The versions of the installed packages among ``names``."""
    installed = {}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def conflicts(installed: Versions) -> list[Conflict]:
    """The conflicts between the packages ``installed``, as returned by :func:`versions`."""
    return [conflict for rule in (_numpy_too_new, _nvvm_too_new) if (conflict := rule(installed))]


def numbers(text: str) -> tuple[int, ...]:
    """``"13.0.88"`` as ``(13, 0, 88)``: the leading numeric parts."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _numpy_too_new(installed: Versions) -> Conflict | None:
    numba = numbers(installed.get("numba", ""))
    numpy = numbers(installed.get("numpy", ""))[:2]
    newest = [limit for since, limit in _NEWEST_NUMPY.items() if numba >= since]
    if not newest or numba >= _NUMBA_READ or numpy <= newest[-1]:
        return None
    enough = next((since for since, limit in _NEWEST_NUMPY.items() if numpy <= limit), None)
    major, minor = newest[-1]
    older = f'pip install "numpy<{major}.{minor + 1}"'
    return Conflict(
        f"numba {installed['numba']} refuses to be imported with numpy {installed['numpy']}; "
        f"{major}.{minor} is its newest",
        older if enough is None else f'pip install "numba>={".".join(map(str, enough))}", or {older}',
    )


def _nvvm_too_new(installed: Versions) -> Conflict | None:
    """libnvvm may be older than nvJitLink but not newer. Both are looked up as by cuda-pathfinder: CUDA 13 first."""
    nvvm = next((name for name in ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12") if name in installed), None)
    nvjitlink = next((name for name in ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12") if name in installed), None)
    if nvvm is None or nvjitlink is None or numbers(installed[nvvm])[:2] <= numbers(installed[nvjitlink])[:2]:
        return None
    major, minor = numbers(installed[nvjitlink])[:2]
    return Conflict(
        f"libnvvm ({nvvm} {installed[nvvm]}) is newer than nvJitLink ({nvjitlink} {installed[nvjitlink]}), which"
        " answers ERROR_OUTDATED_LIBRARY to its code",
        f'pip install "cuda-toolkit[{"nvvm" if major >= 13 else "nvcc"}]=={major}.{minor}.*"',
    )
