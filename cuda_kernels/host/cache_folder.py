"""The folder of compiled kernels: files under the keys that :mod:`cuda_kernels.host.compile_cache` makes."""

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
"""Environment variable: a folder of kernels made by ``lightning-fp8 kernels build``, here or elsewhere; they are taken
whatever compilers are here."""

OFF = "off"
"""Value of :data:`CARRIED_VARIABLE`: no device runs kernels."""

_DIGEST = 32
"""A file begins with so many bytes of SHA-256 of the rest."""

_memory: dict[str, bytes] = {}


def cache_folder() -> Path:
    """The folder that :data:`CACHE_VARIABLE` names, or else ``~/.cache/lightning_fp8``."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry and without HOME
        home = Path(tempfile.gettempdir())
    return Path(os.environ.get(CACHE_VARIABLE) or home / ".cache" / "lightning_fp8")


def cached(key: str, build: Callable[[], bytes]) -> bytes:
    """The bytes under ``key``, or those of ``build``, which are then kept.

    Processes may start at once: each writes a file of its own and renames it. A damaged file is built again. Where the
    folder cannot be written, one warning says so and the bytes live as long as the process.
    """
    if key in _memory:
        return _memory[key]
    path = cache_folder() / key
    code = _read(path)
    if code is None:
        code = build()
        try:
            _write(path, code)
        except OSError as error:
            warn_once(
                f"compiled FP8 kernels cannot be kept in {path.parent} ({error.strerror}) and are compiled again by"
                f" each process; set {CACHE_VARIABLE} to a folder that can be written"
            )
    _memory[key] = code
    return code


def carried(key: str, what: str) -> bytes | None:
    """Read a prebuilt kernel from the folder of :data:`CARRIED_VARIABLE`; None, and a warning, if it has none.

    Args:
        key: the hash of the kernel's source.
        what: the kernel, as the warning names it.
    """
    folder = os.environ.get(CARRIED_VARIABLE)
    if not folder or folder == OFF:
        return None
    code = _read(Path(folder) / key)
    if code is None:
        warn_once(f"{CARRIED_VARIABLE}={folder} holds no {what} made of this source; it is looked for elsewhere")
    return code


def is_carried(key: str) -> bool:
    """Whether something lies under ``key`` in the folder of :data:`CARRIED_VARIABLE`; it may be damaged."""
    folder = os.environ.get(CARRIED_VARIABLE)
    return folder not in (None, "", OFF) and Path(folder, key).exists()


def carry(folder: Path, key: str, code: bytes) -> None:
    """Put ``code`` where :func:`carried` finds it.

    Raises:
        OSError: it cannot be written.
    """
    _write(folder / key, code)


def is_cached(key: str) -> bool:
    """Whether something is kept under ``key``; it may be damaged."""
    return key in _memory or (cache_folder() / key).exists()


def _read(path: Path) -> bytes | None:
    """The bytes that :func:`_write` wrote; None where there is no file, or a damaged one."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn_once(f"{path} cannot be read ({error.strerror})")
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    write_whole(path, hashlib.sha256(code).digest() + code)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is never seen half-written, in folders that are made, with the permissions of any new file.

    Raises:
        OSError: it cannot be written.
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
    """Warn of a folder once in a process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
