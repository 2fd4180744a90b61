"""Tells once if the host, and not the GPU, limits the speed of training; nothing waits for the GPU.

An event is recorded after the backward pass, and queried when the optimizer's step returns. A GPU that has completed it
by then has caught up with the host. A GPU that is the limit is behind by most of a step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fp8.fp8_region import in_backward, waiting

FIRST, LAST = 10, 20
"""The optimizer steps that are watched; compilers have run before."""

_clock = time.perf_counter
_watched: HostLimit | None = None


class HostLimit:
    """Watches the steps of the first optimizer of parameters on a GPU that steps.

    Args:
        tell: called with the message, if there is one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._steps = tell, 0
        self._optimizer: Callable[[], Any] | None = None
        self._begun: tuple[float, Any] | None = None
        self._launched: Any = None
        self._found: list[tuple[bool, float, Any, Any]] = []

    def begins(self) -> bool:
        """Called when the first FP8 region after an optimizer step begins."""
        self._begun, self._launched = None if _is_capturing() else (_clock(), _event()), None
        return True

    def backward_ended(self) -> None:
        """Called before an optimizer step, and again if the step has run the forward and the backward pass."""
        if self._begun is not None and not _is_capturing() and not in_backward():
            self._launched = _event()

    def stepped(self, optimizer: Any) -> bool:
        """Called after an optimizer step. It returns whether all steps were watched."""
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return self._optimizer() is None
        self._steps += 1
        if self._begun is not None and self._launched is not None:
            caught_up = self._launched.query()
            self._found.append((caught_up, 1e3 * (_clock() - self._begun[0]), self._begun[1], _event()))
        self._begun = self._launched = None
        if FIRST - 1 <= self._steps < LAST:
            waiting.append(self.begins)
        if self._steps == LAST:
            self._conclude()
        return self._steps >= LAST

    def _conclude(self) -> None:
        count = sum(caught_up for caught_up, *_ in self._found)
        of_gpu = [begun.elapsed_time(ended) for _, _, begun, ended in self._found if ended.query()]
        if 5 * count < 4 * len(self._found) or not of_gpu:
            return
        self._tell(
            f"the host limits the speed: in {count} of {len(self._found)} steps the GPU had caught up when the "
            f"optimizer's step returned. A step takes the host {median(each[1] for each in self._found):.1f} ms, and "
            f"the GPU {median(of_gpu):.1f} ms with its waits. FP8 makes the GPU faster, not the host: use "
            "torch.compile(model, mode='reduce-overhead'), capture the step in a CUDA graph, or make batches larger; "
            "otherwise BF16 is as fast. A loop that reads a value of the GPU before the optimizer's step, as "
            "loss.item() does, also waits"
        )


def watch_host(tell: Callable[[str], None]) -> None:
    """Watch the steps from now on, on a machine with a GPU."""
    global _watched
    if torch.cuda.is_available():
        _watched = HostLimit(tell)


@torch.compiler.disable
def backward_ended(*_: Any) -> None:
    """See :meth:`HostLimit.backward_ended`."""
    if _watched is not None:
        _watched.backward_ended()


@torch.compiler.disable
def _stepped(optimizer: Any, *_: Any) -> None:
    global _watched
    if _watched is not None and (not _is_on_gpu(optimizer) or _watched.stepped(optimizer)):
        _watched = None


def _is_on_gpu(optimizer: Any) -> bool:
    return any(each.is_cuda for group in optimizer.param_groups for each in group["params"][:1])


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


register_optimizer_step_pre_hook(backward_ended)
register_optimizer_step_post_hook(_stepped)
