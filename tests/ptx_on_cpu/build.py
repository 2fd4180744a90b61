"""Compiles C with gcc and caches the shared objects on disk, keyed by a hash of all they depend on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tests.ptx_on_cpu.errors import EmulatorError

_RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = [
    "-march=native",
    "-ffp-contract=off",  # one rounding per PTX instruction
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-w",
]


def unavailable() -> str | None:
    """Why C cannot be compiled on this machine, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"the emulator's fibers need Linux on x86-64, not {platform.system()} on {platform.machine()}"
    if shutil.which("gcc") is None:
        return "the emulator compiles with gcc, which is not installed"
    return None


def folder() -> Path:
    """The cache of shared objects: ``$PTX_ON_CPU_CACHE``, or else a temporary folder."""
    given = os.environ.get("PTX_ON_CPU_CACHE")
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"ptx_on_cpu_{os.getuid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


@cache
def _compiler() -> str:
    """The compiler's version and the processor that -march=native means."""
    reason = unavailable()
    if reason:
        raise EmulatorError(reason)
    version = subprocess.run(
        ["gcc", "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=True
    ).stdout
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    return version + (processor[0] if processor else "")


@cache
def _runtime_text() -> str:
    return "".join(f"{p.name}\n{p.read_text()}" for p in sorted(_RUNTIME.iterdir()) if p.suffix in (".c", ".h"))


def _compile(name: str, key: str, sources: list[Path] | str, optimization: str) -> Path:
    flags = [optimization, *_FLAGS]
    digest = hashlib.sha256("\0".join([key, _runtime_text(), _compiler(), *flags]).encode()).hexdigest()[:32]
    library = folder() / f"{name}_{digest}.so"
    if library.exists():
        return library
    # Other processes may compile the same source: each writes its own file, and the last one to rename wins.
    with tempfile.TemporaryDirectory(dir=folder()) as temporary:
        if isinstance(sources, str):
            source = Path(temporary) / f"{name}.c"
            source.write_text(sources)
            sources = [source]
        output = Path(temporary) / library.name
        command = ["gcc", *flags, "-I", str(_RUNTIME), "-o", str(output), *map(str, sources), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise EmulatorError(f"gcc does not accept the translation of a kernel:\n{result.stderr[:4000]}")
        os.replace(output, library)
    return library


@cache
def runtime() -> ctypes.CDLL:
    """The runtime, loaded with global symbols, since translated kernels call its functions."""
    library = _compile("runtime", "", sorted(_RUNTIME.glob("*.c")), "-O2")
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def kernel_library(source: str) -> ctypes.CDLL:
    """The shared object of a translated kernel, compiled with -O0: optimizing takes longer than running it."""
    runtime()
    return ctypes.CDLL(str(_compile("kernel", source, source, "-O0")))
