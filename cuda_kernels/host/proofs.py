"""Verdicts on kernels: whether machine code computes right results on a GPU with a driver, stored in files.

A process that trains does not launch a kernel before another process has verified its results on the same GPU. A launch
calls :func:`require` when it loads a kernel: *refused* and *unproven* kernels raise errors, with the reason. The caller
then requests a proof of an unproven kernel (``lightning_fp8/ops/proving.py``), and plans again.

Verdicts are files in the folder of the kernel cache, one per :func:`key_of`: other machine code, another GPU or driver,
or other sources of what launches and checks kernels require a new proof. Files are written atomically, and damaged
files are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuda_kernels.host.cache_folder import cache_folder, warn_once, write_whole
from cuda_kernels.kernel import Kernel, KernelError

VARIABLE = "LIGHTNING_FP8_PROVE"
"""Environment variable: ``0`` launches kernels without a proof, ``always`` proves them again in each process."""

HOW_TO_REPEAT = "lightning-fp8 doctor --prove"
"""The command that proves all kernels again and prints the results."""


class Card(NamedTuple):
    """The properties of a GPU that a proof depends on.

    Attributes:
        name: the GPU's name.
        capability: the GPU's compute capability, major and minor.
        driver: the versions of the driver.
    """

    name: str
    capability: tuple[int, int]
    driver: str

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver})"


@dataclass(frozen=True)
class Verdict:
    """The result of a proof.

    Attributes:
        kernel: the name of the kernel.
        card, driver: the GPU and the driver on which it ran.
        proven: whether the results were right.
        reason: why the proof failed.
    """

    kernel: str
    card: str
    driver: str
    proven: bool
    reason: str = ""


class Unproven(KernelError):
    """The kernel has not been proven on this GPU yet.

    Attributes:
        key: the key of the missing verdict.
        card: the GPU.
    """

    def __init__(self, kernel: Kernel, card: Card, key: str) -> None:
        super().__init__(f"{kernel.name} has not been proven on {card}")
        self.key = key
        self.card = card


class Refused(KernelError):
    """The kernel failed its proof on this GPU."""


Watcher = Callable[[str, Kernel, str], None]
"""A function of a process that proves kernels. It is called with the key of a kernel's verdict and what happens:

- ``compiling``: the kernel is about to be compiled, or read from the cache; the key is not known yet
- ``loading``: a launch binds the kernel
- ``starting``: the kernel is about to be launched
"""

SOURCES = [Path(__file__).parents[1]]
"""Folders whose Python files are included in :func:`key_of`."""

WAITING = 600.0
"""Seconds to wait for another process that proves kernels."""

_known: dict[str, Verdict] = {}
_required: dict[str, tuple[str, Card]] = {}
_watcher: Watcher | None = None


def require(kernel: Kernel, card: Card, code: bytes) -> None:
    """Refuse to load machine code that is not proven on ``card``.

    Raises:
        Unproven: there is no verdict.
        Refused: its proof failed.
    """
    if os.environ.get(VARIABLE) == "0" and _watcher is None:
        return
    key = key_of(card, code)
    _required[kernel.name] = key, card
    if _watcher is not None:
        return
    verdict = verdict_of(key)
    if verdict is None:
        raise Unproven(kernel, card, key)
    if not verdict.proven:
        raise refusal(verdict)


def refusal(verdict: Verdict) -> Refused:
    """The error for a kernel that failed its proof."""
    return Refused(
        f"{verdict.kernel} is not used on {verdict.card} (driver {verdict.driver}): {verdict.reason}; repeat the test "
        f"with {HOW_TO_REPEAT}"
    )


def is_watched() -> bool:
    """Whether this process proves kernels."""
    return _watcher is not None


def note(what: str, kernel: Kernel) -> None:
    """Call the watcher, if there is one; what it raises refuses the kernel."""
    if _watcher is not None:
        _watcher(what, kernel, "" if what == "compiling" else _required[kernel.name][0])


def watch(watcher: Watcher | None) -> None:
    """Let this process launch every kernel, and call ``watcher``; None ends that."""
    global _watcher
    _watcher = watcher


def withdraw(kernel_name: str, reason: str) -> None:
    """Refuse a kernel from now on: it was loaded in this process, and computed wrong results after its proof."""
    if kernel_name in _required:
        key, card = _required[kernel_name]
        keep(key, Verdict(kernel_name, card.name, card.driver, False, reason))


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def key_of(card: Card, code: bytes) -> str:
    """The key of a verdict on machine code."""
    words = hashlib.sha256(code).hexdigest(), tuple(card), _hash_of(tuple(SOURCES))
    return hashlib.sha256(repr(words).encode()).hexdigest()


@cache
def _hash_of(folders: tuple[Path, ...]) -> str:
    """Hash of all Python files in these folders."""
    files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def verdict_of(key: str) -> Verdict | None:
    """The stored verdict, or None; with ``always``, only verdicts stored by this process."""
    if key in _known:
        return _known[key]
    if os.environ.get(VARIABLE) == "always":
        return None
    verdict = _read(_path_of(key))
    if verdict is not None:
        _known[key] = verdict
    return verdict


def keep(key: str, verdict: Verdict) -> None:
    """Store a verdict, also for other processes if the folder is writable; otherwise a warning is issued once."""
    _known[key] = verdict
    path = _path_of(key)
    try:
        write_whole(path, json.dumps({"key": key, **asdict(verdict)}, indent=1).encode())
    except OSError as error:
        warn_once(
            f"tests of FP8 kernels cannot be kept in {path.parent} ({error.strerror}) and are repeated by each process;"
            " set LIGHTNING_FP8_CACHE to a folder that can be written"
        )


@contextmanager
def one_prover() -> Iterator[None]:
    """Context in which only one process of this machine proves kernels, among those that share the cache's folder.

    A waiting process prints a message, and continues without the lock after :data:`WAITING`.
    """
    try:
        import fcntl
    except ImportError:  # not Unix
        yield
        return
    path = _folder() / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:  # `keep` warns
        yield
        return
    start, told = time.monotonic(), False
    with file:
        while time.monotonic() - start < WAITING:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - start > 5:
                    told = True
                    print("waiting for another process that tests FP8 kernels on this machine", file=sys.stderr)
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        try:
            yield
        finally:  # unlock explicitly: a process forked meanwhile keeps the file open
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _folder() -> Path:
    return cache_folder() / "proofs"


def _path_of(key: str) -> Path:
    return _folder() / f"{key}.json"


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None if the file does not exist or is damaged."""
    try:
        content = json.loads(path.read_bytes())
        key = content.pop("key")
        verdict = Verdict(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    types = all(isinstance(getattr(verdict, name), str) for name in ("kernel", "card", "driver", "reason"))
    return verdict if key == path.stem and types and isinstance(verdict.proven, bool) else None
