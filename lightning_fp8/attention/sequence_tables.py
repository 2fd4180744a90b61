"""What attention makes of a batch's lengths, once for all layers that attend in it, as long as one of them keeps it.

What keeps it is the autograd graph: a backward pass takes the tables of its forward pass, and the layers of a step
share them. Where nothing is kept (no gradients, activation checkpointing), every call makes its own. So nothing
outlives the step that it was made in, and a change of lengths that torch cannot see, by a kernel of one's own or by
NumPy, has to fall between forward and backward passes to be missed, where autograd misses it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_fp8.attention.ops import Attention, attention_tables

Refs = tuple[TensorWeakRef, ...]
_kept: dict[Hashable, tuple[Refs, Refs]] = {}
"""What tensors were made of, and they."""


def on_card(device: torch.device) -> bool:
    """Whether attention on ``device`` reads tables, and what is made there takes the host's time."""
    return device.type == "cuda"


def shared(
    device: torch.device, sources: tuple[Tensor, ...], key: Hashable, make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``make`` makes of ``sources`` and ``key``: the very tensors that somebody keeps, if somebody does.

    They are taken again for the same sources, unchanged since (by their version counters), on the same stream of a
    card. Compiled code finds equal calls itself; inside a CUDA graph each call is part of the graph, since replays read
    what the sources hold then.
    """
    if torch.compiler.is_compiling() or not on_card(device) or not all(map(_is_followed, sources)):
        return make()
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(device).cuda_stream
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


def shared_tables(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    attention: Attention,
    query_rows: int,
    key_rows: int,
    device: torch.device,
) -> Tensor:
    """:func:`~lightning_fp8.attention.ops.attention_tables`, :func:`shared`."""

    def made() -> tuple[Tensor]:
        return (attention_tables(cu_seqlens_q, cu_seqlens_kv, attention, query_rows, key_rows, device),)

    (tables,) = shared(device, (cu_seqlens_q, cu_seqlens_kv), (attention, query_rows, key_rows), made)
    return tables


def _is_followed(x: Tensor) -> bool:
    """Whether a version counter follows what is written to ``x``."""
    return type(x) is Tensor and not x.is_inference()
