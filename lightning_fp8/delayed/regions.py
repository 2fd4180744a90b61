"""Which threads are inside an outermost region of ``fp8_autocast`` that takes gradients or calibrates."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch

one_thread = threading.RLock()
"""Held while histories are looked at and updated: meanwhile no region begins."""

_inside: set[int] = set()
"""Identifiers of threads."""


@torch.compiler.disable  # it knows no threads
def enter() -> None:
    """Note that this thread is inside a region."""
    with one_thread:
        _inside.add(threading.get_ident())


@torch.compiler.disable
def leave() -> None:
    """Note that this thread has left its outermost region, if it was inside one."""
    _inside.discard(threading.get_ident())


def another_thread_inside() -> bool:
    """Whether another thread, which still runs, is inside a region."""
    return bool(running(_inside - {threading.get_ident()}))


def running(identifiers: Collection[int]) -> set[int]:
    """Those of the threads that still run; who ended inside a region waits for nothing."""
    if not identifiers:
        return set()
    return {thread.ident for thread in threading.enumerate() if thread.ident in identifiers}  # type: ignore[misc]
