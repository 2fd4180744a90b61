"""Compile kernels before their first launch, in parallel processes, into this machine's cache.

``lightning-fp8 kernels build`` (``lightning_fp8/cli/kernels.py``) compiles into a folder for other machines.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from cuda_kernels.host import compile_cache
from cuda_kernels.kernel import Kernel

Build = tuple[Callable[..., Kernel], tuple[Any, ...]]
"""A module-level function that makes a kernel, and its arguments."""


def missing(builds: Iterable[Build], arch: str) -> list[Build]:
    """Builds whose machine code for ``arch`` is neither prebuilt nor cached; each kernel once."""
    kernels = {function(*arguments): (function, arguments) for function, arguments in builds}
    return [build for kernel, build in kernels.items() if not compile_cache.is_compiled(kernel, arch)]


def num_processors() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_pool(num_tasks: int) -> ProcessPoolExecutor:
    """At most one process per processor and task; spawned, since this process may have CUDA and threads."""
    return ProcessPoolExecutor(min(num_processors(), num_tasks), mp_context=multiprocessing.get_context("spawn"))


def compile_ahead(builds: list[Build], arch: str) -> Iterator[None]:
    """Compile into the cache on disk, on all processors; yields after each kernel.

    Errors are ignored here; the first launch raises them.
    """
    if not builds:
        return
    with process_pool(len(builds)) as pool:
        try:
            for done in as_completed([pool.submit(_compile, *build, arch) for build in builds]):
                done.exception()
                yield
        except BrokenProcessPool:
            return


def _compile(function: Callable[..., Kernel], arguments: tuple[Any, ...], arch: str) -> None:
    compile_cache.cubin(function(*arguments), arch)
