"""The state of each thread: the contexts that it has entered, and the inputs that its layers have cast."""

from __future__ import annotations

import threading
from typing import Any

NO_BACKWARD = -1
"""The number that autograd returns for code that does not run in a backward pass."""


class _Thread(threading.local):
    """torch.compile(fullgraph=True) guards on it, but cannot trace a ContextVar.

    It is set by ``__init__``, which runs in every thread. Dynamo would use a class attribute for all threads.

    Attributes:
        context: the ``FP8Context`` of the innermost region of :mod:`lightning_fp8.fp8_region`; None outside of all.
        backward: the backward pass in which that region was entered.
        active_regions: the number of regions that compute in FP8 or calibrate.
        num_enabled: the number of enabled regions that were entered so far, but for those in compiled code.
        casts: the last inputs and their casts, newest first; see :mod:`lightning_fp8.functions.shared_input`.
        is_capturing: whether the innermost region was entered in the capture of a CUDA graph.
        owners: the modules that compute attention and whose forwards run, innermost last.
        weights: how layers that are constructed store their weights; see :mod:`lightning_fp8.weights.model_init`.
    """

    def __init__(self) -> None:
        self.context: Any = None
        self.backward = NO_BACKWARD
        self.active_regions = 0
        self.num_enabled = 0
        self.casts: tuple[Any, ...] = ()
        self.is_capturing = False
        self.owners: list[Any] = []
        self.weights: Any = None


thread = _Thread()
