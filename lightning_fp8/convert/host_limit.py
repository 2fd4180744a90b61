"""Tells once if the host, and not the GPU, limits the speed of training; nothing waits for the GPU.

An event is recorded after the backward pass, and queried when the optimizer's step returns. A GPU that has completed it
by then has caught up with the host. A GPU that is the limit is behind by most of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lightning_fp8.capture import is_capturing
from lightning_fp8.fp8_region import in_backward, waiting
from lightning_fp8.optimizer_steps import after, before, leave, listen

FIRST, LAST = 10, 20
"""The optimizer steps that are watched; compilers have run before."""
OTHERS = 100
"""After so many steps of optimizers that are not on a GPU, none is awaited."""

_clock = time.perf_counter


@dataclass
class HostLimit:
    """What is known of the steps that follow an FP8 region; others, as of several optimizers in turn, do not count.

    ``begun``: the time and the event of the first region after a step, where steps are watched.
    """

    tell: Callable[[str], None]
    steps: int = 0
    others: int = 0
    is_begun: bool = False
    begun: tuple[float, Any] | None = None
    launched: Any = None
    found: list[tuple[bool, float, Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        waiting.append(self.begins)

    def begins(self) -> bool:
        """Called when the first FP8 region after a step begins."""
        self.is_begun = True
        if self.steps >= FIRST - 1 and not is_capturing():
            self.begun = _clock(), _event()
        return True

    def stepped(self) -> bool:
        """Called after an optimizer step on a GPU; tells what was found and returns True after the last one."""
        if not self.is_begun:
            return False
        self.steps += 1
        if self.begun is not None and self.launched is not None:
            caught_up = self.launched.query()
            self.found.append((caught_up, 1e3 * (_clock() - self.begun[0]), self.begun[1], _event()))
        self.is_begun, self.begun, self.launched = False, None, None
        if self.steps < LAST:
            waiting.append(self.begins)
            return False
        count = sum(caught_up for caught_up, *_ in self.found)
        of_gpu = [begun.elapsed_time(ended) for _, _, begun, ended in self.found if ended.query()]
        if 5 * count >= 4 * len(self.found) and of_gpu:
            self.tell(
                f"the host limits the speed: in {count} of {len(self.found)} steps the GPU had caught up when the "
                f"optimizer's step returned. A step takes the host {median(each[1] for each in self.found):.1f} ms, "
                f"and the GPU {median(of_gpu):.1f} ms with its waits. FP8 makes the GPU faster, not the host: use "
                "torch.compile(model, mode='reduce-overhead'), capture the step in a CUDA graph, or make batches "
                "larger; otherwise BF16 is as fast. A loop that reads a value of the GPU before the optimizer's step, "
                "as loss.item() does, also waits"
            )
        return True


_watched: HostLimit | None = None


def watch_host(tell: Callable[[str], None]) -> None:
    """Watch the steps on a GPU from now on; ``tell`` is called with the message, if there is one."""
    global _watched
    if _watched is not None:
        leave(waiting, _watched.begins)
    _watched = HostLimit(tell)  # without a look for a GPU, after which a process that is forked could not use it
    listen(before, backward_ended)
    listen(after, _stepped)


def backward_ended(_: Any = None) -> None:
    """Called before an optimizer step, and again if the step has run the forward and the backward pass."""
    if _watched is not None and _watched.begun is not None and not is_capturing() and not in_backward():
        _watched.launched = _event()


def _stepped(optimizer: Any) -> None:
    global _watched
    if _watched is not None and _is_on_gpu(optimizer):
        if _watched.stepped():
            _watched = None
    elif _watched is not None:
        _watched.others += 1
    if _watched is None or _watched.others == OTHERS:
        leave(before, backward_ended)
        leave(after, _stepped)


def _is_on_gpu(optimizer: Any) -> bool:
    return any(each.is_cuda for group in optimizer.param_groups for each in group["params"][:1])


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
