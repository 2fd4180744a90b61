"""Prints the paths of the compilers' libraries as JSON; run as a program, which loads them.

Libraries are searched by cuda-pathfinder, as numba-cuda and cuda-bindings do: wheels, conda, the linker's own search,
``CUDA_PATH`` or ``CUDA_HOME``, and the toolkit that libcudart lies in. libdevice is searched by numba-cuda itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Mapping
from ctypes import byref, c_int
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

LIBRARIES = {"libnvvm": "nvvm", "libnvJitLink": "nvJitLink", "libnvrtc": "nvrtc"}
"""Names of libraries, and pathfinder's for them. Our kernels need no libnvrtc, but numba-cuda looks for it first."""

_ASKED = {"libnvJitLink": "nvJitLinkVersion", "libnvrtc": "nvrtcVersion"}

LIBDEVICE = Path("nvvm", "libdevice", "libdevice.10.bc")


def found_compilers() -> dict[str, dict[str, str]]:
    """For each, its ``path``, how it was found (``via``), its CUDA ``version``; or the ``problem``."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        return {name: {"problem": f"{error}"} for name in (*LIBRARIES, "libdevice")}
    places = {}
    for name, short in LIBRARIES.items():
        try:
            library = load_nvidia_dynamic_lib(short)
            path = library.abs_path or ""
            places[name] = {"path": path, "via": str(library.found_via), "version": _version(name, path)}
        except Exception as error:  # of pathfinder's own kinds, or the linker's
            places[name] = {"problem": str(error).strip().splitlines()[0]}
    places["libdevice"] = libdevice(os.environ, sys.prefix)
    return places


def libdevice(variables: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The file that numba-cuda reads libdevice from: the first of conda, a wheel, ``CUDA_HOME`` and /usr/local/cuda."""
    wheel12 = _files_of("nvidia-cuda-nvcc-cu12")
    wheel13 = _files_of("nvidia-nvvm")
    conda = Path(prefix) if Path(prefix, "conda-meta").is_dir() else None
    home = variables.get("CUDA_HOME", variables.get("CUDA_PATH"))
    places = {
        "conda": conda,
        "site-packages": wheel12 / "nvidia" / "cuda_nvcc" if wheel12 else wheel13 and wheel13 / "nvidia" / "cu13",
        "CUDA_HOME": None if home is None else Path(home),
        "/usr/local/cuda": Path("/usr/local/cuda"),
    }
    for via, root in places.items():
        if root is not None and (root / LIBDEVICE).is_file():
            return {"path": str(root / LIBDEVICE), "via": via}
        if via == "CUDA_HOME" and root is not None:  # it is taken unseen
            return {"problem": f"CUDA_HOME={home} holds no {LIBDEVICE}"}
    return {"problem": f"no {LIBDEVICE} in a wheel, CUDA_HOME or /usr/local/cuda"}


def _files_of(package: str) -> Path | None:
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        return None


def _version(name: str, path: str) -> str:
    """The CUDA version of a library: as it says; libnvvm says none, there it is its toolkit's or its wheel's."""
    if name in _ASKED:
        major, minor = c_int(), c_int()
        ask: Any = getattr(ctypes.CDLL(path), _ASKED[name], None)  # nvJitLink of CUDA 12.0 has none
        return f"{major.value}.{minor.value}" if ask and ask(byref(major), byref(minor)) == 0 else ""
    for folder in Path(path).parents:
        if folder.joinpath("version.json").is_file():
            told = json.loads(folder.joinpath("version.json").read_text())
            return str(told.get("cuda_nvcc", told.get("cuda", {})).get("version", ""))
        if folder.name == "nvidia":
            package = "nvidia-nvvm" if "cu13" in Path(path).parts else "nvidia-cuda-nvcc-cu12"
            return distribution(package).version if _files_of(package) else ""
    toolkit = re.search(r"cuda-(\d+\.\d+)", str(Path(path).resolve()))
    return toolkit[1] if toolkit else ""


if __name__ == "__main__":
    print(json.dumps(found_compilers()))
