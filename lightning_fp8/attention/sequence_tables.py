"""Tables computed from a batch's sequence lengths, shared by all attention layers of a step.

The autograd graph keeps them alive: a backward pass uses the tables of its forward pass, and the layers of a step share
them. If nothing keeps them (no gradients, activation checkpointing), every call computes its own. So no table outlives
its step. A change of lengths that autograd's version counters miss, by a custom kernel or NumPy, is missed only between
a forward pass and its backward pass, where autograd misses it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_fp8.capture import is_capturing

Refs = tuple[TensorWeakRef, ...]
_kept: dict[Hashable, tuple[Refs, Refs]] = {}
"""By key: weak references to the source tensors, and to the tables made of them."""


def on_card(device: torch.device) -> bool:
    """Whether attention on ``device`` needs tables, whose computation costs host time."""
    return device.type == "cuda"


def shared(
    device: torch.device, sources: tuple[Tensor, ...], key: Hashable, make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The tensors that ``make`` computes from ``sources`` and ``key``; cached as long as they are in use.

    Cached tensors are reused for the same sources, if unchanged (by their version counters), on the same CUDA stream.
    Compiled code merges equal calls itself. In a CUDA graph each call is captured, because a replay must read the
    sources' current values.
    """
    if torch.compiler.is_compiling() or is_capturing() or not on_card(device) or not all(map(_is_followed, sources)):
        return make()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    of = *((id(source), source._version) for source in sources), key, device, stream
    if of in _kept:
        from_sources, found = ([ref() for ref in refs] for refs in _kept[of])
        alive = [table for table in found if table is not None]
        if len(alive) == len(found) and all(one is other for one, other in zip(from_sources, sources)):
            return tuple(alive)
    for dead in [other for other, refs in _kept.items() if any(ref() is None for group in refs for ref in group)]:
        _kept.pop(dead, None)
    made = make()
    _kept[of] = tuple(map(TensorWeakRef, sources)), tuple(map(TensorWeakRef, made))
    return made


def _is_followed(x: Tensor) -> bool:
    """Whether a version counter records writes to ``x``."""
    return type(x) is Tensor and not x.is_inference()
