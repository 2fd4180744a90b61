"""The folder of compiled kernels: files named by the keys of :mod:`cuda_kernels.host.compile_cache`."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

CACHE_VARIABLE = "LIGHTNING_FP8_CACHE"
"""Environment variable: the folder of compiled kernels, instead of ``~/.cache/lightning_fp8``."""

CARRIED_VARIABLE = "LIGHTNING_FP8_KERNELS"
"""Environment variable: a folder of kernels made by ``lightning-fp8 kernels build``, on any machine; they are used
whatever compilers are installed."""

OFF = "off"
"""Value of :data:`CARRIED_VARIABLE` that disables kernels on all devices."""

_DIGEST = 32
"""Each file starts with this many bytes: the SHA-256 of the rest."""

_memory: dict[str, bytes] = {}


def cache_folder() -> Path:
    """The folder in :data:`CACHE_VARIABLE`, or else ``~/.cache/lightning_fp8``."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no entry for this user
        home = Path(tempfile.gettempdir())
    return Path(os.environ.get(CACHE_VARIABLE) or home / ".cache" / "lightning_fp8")


def cached(key: str, build: Callable[[], bytes]) -> bytes:
    """The bytes cached under ``key``; if there are none, those of ``build``, which are then cached.

    Safe with concurrent processes: each writes its own file and renames it. A damaged file is built again. If the
    folder is not writable, a warning is issued once, and bytes are cached in memory only.
    """
    if key in _memory:
        return _memory[key]
    path = cache_folder() / key
    code = _read(path)
    if code is None:
        code = build()
        try:
            write_code(path, code)
        except OSError as error:
            warn_once(
                f"compiled FP8 kernels cannot be cached in {path.parent} ({error.strerror}) and are compiled again by"
                f" each process; set {CACHE_VARIABLE} to a folder that can be written"
            )
    _memory[key] = code
    return code


def carried(key: str, what: str) -> bytes | None:
    """Read a prebuilt kernel from the folder of :data:`CARRIED_VARIABLE`; returns None, with a warning, if it has none.

    Args:
        key: the hash of the kernel's source.
        what: the kernel's name in the warning.
    """
    folder = os.environ.get(CARRIED_VARIABLE)
    if not folder or folder == OFF:
        return None
    code = _read(Path(folder) / key)
    if code is None:
        warn_once(f"{CARRIED_VARIABLE}={folder} has no {what} of this source; other places are searched for it")
    return code


def is_carried(key: str) -> bool:
    """Whether the folder of :data:`CARRIED_VARIABLE` has a file for ``key``; it may be damaged."""
    folder = os.environ.get(CARRIED_VARIABLE)
    return folder not in (None, "", OFF) and Path(folder, key).exists()


def is_cached(key: str) -> bool:
    """Whether ``key`` is cached; the file may be damaged."""
    return key in _memory or (cache_folder() / key).exists()


def _read(path: Path) -> bytes | None:
    """The bytes written by :func:`write_code`; None if the file does not exist or is damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(f"{path} cannot be read ({error.strerror})")
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def write_code(path: Path, code: bytes) -> None:
    """Write a kernel's file; :func:`write_whole` says what is raised."""
    write_whole(path, hashlib.sha256(code).digest() + code)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically; creates its folders, and uses default permissions.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@cache
def warn_once(message: str) -> None:
    """Issue a warning once per process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
