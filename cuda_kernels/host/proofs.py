"""Which kernels a card has proven: a verdict for each machine code on a card with a driver, kept in files.

No kernel is started in a process that trains before it has computed right results on that card in another process. A
launch calls :func:`require` as it loads a kernel: a *refused* kernel is an error with the reason, and an *unproven*
one too, which says that a proof is missing. Who plans launches then has it made (``lightning_fp8/ops/proving.py``) and
plans again.

Verdicts are files of the kernel cache's folder, one for each :func:`key_of`: another machine code, card or driver, or
other sources of what starts and checks it, need another proof. A file appears whole, by a rename; a damaged one counts
as none. ``proven.txt`` lists the keys that cards of this package's authors have proven.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from cuda_kernels.host.cache_folder import cache_folder, warn_once, write_whole
from cuda_kernels.kernel import Kernel, KernelError

VARIABLE = "LIGHTNING_FP8_PROVE"
"""Environment variable: ``0`` starts kernels without a proof, ``always`` proves them again in each process."""

HOW_TO_REPEAT = "lightning-fp8 doctor --prove"
"""The command that proves all kernels anew and prints what came out."""


class Card(NamedTuple):
    """A GPU as far as a proof depends on it.

    Attributes:
        name: of the GPU.
        capability: its compute capability, major and minor.
        driver: versions of the driver.
    """

    name: str
    capability: tuple[int, int]
    driver: str

    def __str__(self) -> str:
        return f"{self.name} (driver {self.driver})"


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    Attributes:
        kernel: its name.
        card, driver: where it ran.
        proven: the results were right.
        reason: why not.
    """

    kernel: str
    card: str
    driver: str
    proven: bool
    reason: str = ""


class Unproven(KernelError):
    """This card has not proven a kernel yet.

    Attributes:
        key: of the verdict that is missing.
        card: where it is.
    """

    def __init__(self, kernel: Kernel, card: Card, key: str) -> None:
        super().__init__(f"{kernel.name} has not been proven on {card}")
        self.key = key
        self.card = card


class Refused(KernelError):
    """A kernel failed its proof on this card."""


class Watcher(Protocol):
    """What a process that proves kernels learns of them."""

    def compiling(self, kernel: Kernel) -> None:
        """The kernel is about to be compiled, or read from the cache."""

    def loading(self, kernel: Kernel, key: str) -> None:
        """A launch binds the kernel; its verdict has this key."""

    def starting(self, kernel: Kernel, key: str) -> None:
        """The kernel is about to be started."""


SOURCES = [Path(__file__).parents[1]]
"""Folders whose Python files count in :func:`key_of`."""

WAITING = 600.0
"""Seconds to wait for another process that proves kernels."""

_known: dict[str, Verdict] = {}
_required: dict[str, tuple[str, Card]] = {}
_watcher: Watcher | None = None


def require(kernel: Kernel, card: Card, code: bytes) -> None:
    """Refuse to load machine code that ``card`` has not proven.

    Raises:
        Unproven: there is no verdict.
        Refused: it failed.
    """
    if os.environ.get(VARIABLE) == "0" and _watcher is None:
        return None
    key = key_of(card, code)
    _required[kernel.name] = key, card
    if _watcher is not None:
        return None
    verdict = verdict_of(key)
    if verdict is None:
        raise Unproven(kernel, card, key)
    if not verdict.proven:
        raise refusal(verdict)
    return None


def refusal(verdict: Verdict) -> Refused:
    """The error of a kernel that failed its proof."""
    return Refused(
        f"{verdict.kernel} is not used on {verdict.card} (driver {verdict.driver}): {verdict.reason}; repeat the test "
        f"with {HOW_TO_REPEAT}"
    )


def is_watched() -> bool:
    """Whether this process proves kernels."""
    return _watcher is not None


def compiling(kernel: Kernel) -> None:
    """Tell the watcher, if there is one, that the kernel is about to be compiled."""
    if _watcher is not None:
        _watcher.compiling(kernel)


def binding(kernel: Kernel) -> None:
    """Tell the watcher, if there is one, of a launch that binds a loaded kernel.

    Raises:
        Refused: the kernel failed its proof before.
    """
    if _watcher is not None:
        _watcher.loading(kernel, _required[kernel.name][0])


def starting(kernel: Kernel) -> None:
    """Tell the watcher, if there is one, that the kernel is about to be started."""
    if _watcher is not None:
        _watcher.starting(kernel, _required[kernel.name][0])


def watch(watcher: Watcher | None) -> None:
    """Let this process start every kernel, and tell ``watcher`` of it; None ends that."""
    global _watcher
    _watcher = watcher


def withdraw(kernel_name: str, reason: str) -> None:
    """Refuse a kernel from now on that was loaded in this process: it computed wrong results after its proof."""
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
    """Of all Python files in these folders."""
    files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def verdict_of(key: str) -> Verdict | None:
    """The verdict that was kept, or None; with ``always``, only what this process has kept."""
    if key in _known:
        return _known[key]
    if os.environ.get(VARIABLE) == "always":
        return None
    verdict = _read(_path_of(key)) or (Verdict("", "", "", True) if key in _proven_by_authors() else None)
    if verdict is not None:
        _known[key] = verdict
    return verdict


def keep(key: str, verdict: Verdict) -> None:
    """Keep a verdict, for other processes too unless the folder cannot be written, of which one warning tells."""
    _known[key] = verdict
    path = _path_of(key)
    try:
        write_whole(path, json.dumps({"key": key, **asdict(verdict)}, indent=1).encode())
    except OSError as error:
        warn_once(
            f"tests of FP8 kernels cannot be kept in {path.parent} ({error.strerror}) and are repeated by each process;"
            " set LIGHTNING_FP8_CACHE to a folder that can be written"
        )


def forget() -> None:
    """Forget what this process knows, but no file."""
    _known.clear()


@contextmanager
def one_prover() -> Iterator[None]:
    """Let one process of this machine prove kernels at a time, as far as they share the cache's folder.

    One that waits says so, and goes on without the lock after :data:`WAITING`.
    """
    try:
        import fcntl
    except ImportError:  # no Unix
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
        finally:  # a process that was forked meanwhile keeps the file open
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _folder() -> Path:
    return cache_folder() / "proofs"


def _path_of(key: str) -> Path:
    return _folder() / f"{key}.json"


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is no file, or a damaged one."""
    try:
        content = json.loads(path.read_bytes())
        key = content.pop("key")
        verdict = Verdict(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    types = all(isinstance(getattr(verdict, name), str) for name in ("kernel", "card", "driver", "reason"))
    return verdict if key == path.stem and types and isinstance(verdict.proven, bool) else None


@cache
def _proven_by_authors() -> frozenset[str]:
    lines = Path(__file__).with_name("proven.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))
