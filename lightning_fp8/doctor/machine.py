"""The facts of a machine, each asked for when it is wanted; another :class:`Machine` tells of another one."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from cuda_kernels.host import toolchain
from cuda_kernels.host.cache_folder import cache_folder
from lightning_fp8.doctor.processes import Answer, ask
from lightning_fp8.version import __version__

PACKAGES = ("torch", "lightning", "pytorch-lightning", *toolchain.COMPANIONS, *toolchain.TOOLS, "triton")

CARRIED_VARIABLE = "LIGHTNING_FP8_KERNELS"
"""Environment variable: a folder of kernels that were compiled elsewhere."""

DRIVER_SECONDS = 20
"""Within which a driver answers; the first question after a start of the machine takes some."""

COMPILER_SECONDS = 20


@dataclass(frozen=True)
class Torch:
    """The build of torch.

    Attributes:
        version: ``torch.__version__``; its package's says less.
        cuda_version: CUDA's version, None for a build without.
    """

    version: str
    cuda_version: str | None


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class Driver:
    """The driver's answers.

    Attributes:
        version: of the driver, e.g. ``580.159.03``.
        cuda_version: the newest CUDA that it supports, e.g. ``(13, 0)``.
        cards: in the order of CUDA, as far as ``CUDA_VISIBLE_DEVICES`` lets them be seen.
        problem: why there are none.
        status: cuInit's, where that is the problem.
        hangs: whether it gave no answer, or took the process down that asked.
        devices: whether the system has device files of NVIDIA cards.
    """

    version: str | None = None
    cuda_version: tuple[int, int] | None = None
    cards: tuple[Card, ...] = ()
    problem: str = ""
    status: int = 0
    hangs: bool = False
    devices: bool = False


@dataclass(frozen=True)
class Cache:
    """The folder of compiled kernels: how many there are, their bytes, and why nothing can be written, if so."""

    folder: str
    kernels: int = 0
    bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """The source of the facts that checks judge.

    Attributes:
        system: this package, Python, the operating system.
        variables: of the environment.
        requirements: the oldest versions that this package asks for.
        versions: of the packages that take part, as installed.
        torch_build: None if torch is not installed.
        compilers: see :func:`lightning_fp8.doctor.compilers.found_compilers`.
        cache: of kernels compiled here.
        carried: kernels compiled elsewhere, if they are to be taken.
        probe: starts a probe by name; see :mod:`lightning_fp8.doctor.probes`.
    """

    system: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    requirements: Callable[[], Mapping[str, str]] = dict
    versions: Callable[[], Mapping[str, str]] = dict
    torch_build: Callable[[], Torch | None] = lambda: None
    driver: Callable[[], Driver] = Driver
    compilers: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    cache: Callable[[], Cache] = lambda: Cache("")
    carried: Callable[[], Cache | None] = lambda: None
    probe: Callable[[str, Mapping[str, str]], Answer] = lambda name, variables: Answer(0)


def this_machine(probe_seconds: float) -> Machine:
    """The machine that this runs on; each probe may take ``probe_seconds``."""
    return Machine(
        system=f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        variables=os.environ,
        requirements=lambda: oldest(_requirements()),
        versions=lambda: toolchain.versions(PACKAGES),
        torch_build=torch_build,
        driver=cache(lambda: driver_of(ask("driver", limit=DRIVER_SECONDS), any(Path("/dev").glob("nvidia[0-9]*")))),
        compilers=lambda: compilers_of(ask("compilers", limit=COMPILER_SECONDS)),
        cache=lambda: cache_in(cache_folder()),
        carried=lambda: cache_in(Path(folder)) if (folder := os.environ.get(CARRIED_VARIABLE)) else None,
        probe=lambda name, more: ask("probes", name, str(probe_seconds), limit=probe_seconds, variables=more),
    )


def _requirements() -> Sequence[str]:
    try:
        return requires("lightning-fp8") or ()
    except PackageNotFoundError:  # a checkout that is not installed
        return ()


def oldest(requirements: Sequence[str]) -> dict[str, str]:
    """The lower bounds among requirements that always hold: ``torch>=2.8`` gives torch 2.8."""
    found = (re.fullmatch(r"([\w.-]+)\s*>=\s*([\w.]+)[^;]*", requirement.strip()) for requirement in requirements)
    return {match[1]: match[2] for match in found if match}


def torch_build() -> Torch | None:
    """From the file in which torch keeps its version: importing torch takes seconds, and may fail."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    said = dict(re.findall(r"^(__version__|cuda)\b[^=]*= '([^']*)'", text, re.MULTILINE))
    return Torch(said.get("__version__", "of unknown version"), said.get("cuda"))


def driver_of(answer: Answer, devices: bool) -> Driver:
    """The answer of :mod:`lightning_fp8.doctor.driver` as facts."""
    if answer.status != 0:
        problem = f"did not answer within {DRIVER_SECONDS} s" if answer.status is None else answer.last_word
        return Driver(problem=problem, hangs=True, devices=devices)
    told = json.loads(answer.output)
    cards = tuple(Card(name, (major, minor), size) for name, (major, minor), size in told.get("cards", ()))
    cuda_version = tuple(told["cuda"]) if told.get("cuda") else None
    problem = told.get("problem", "")
    status = told.get("status", 0)
    return Driver(told["version"], cuda_version, cards, problem, status, devices=devices)


def compilers_of(answer: Answer) -> dict[str, dict[str, str]]:
    """The answer of :mod:`lightning_fp8.doctor.compilers` as facts."""
    if answer.status == 0:
        return dict(json.loads(answer.output))
    problem = f"no answer within {COMPILER_SECONDS} s" if answer.status is None else answer.last_word
    return {"compilers": {"problem": f"their libraries cannot be loaded: {problem}"}}


def cache_in(folder: Path) -> Cache:
    """The kernels in ``folder``, which need not exist yet. Kernels are files named by a hash of 64 digits."""
    sizes = []
    problem = ""
    try:
        if folder.is_dir():
            sizes = [entry.stat().st_size for entry in os.scandir(folder) if re.fullmatch(r"[0-9a-f]{64}", entry.name)]
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        problem = error.strerror or str(error)
    return Cache(str(folder), len(sizes), sum(sizes), problem)
