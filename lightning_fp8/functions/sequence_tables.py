"""Tables of a batch's lengths, made once for all layers that attend in it, as long as one of them keeps them.

What keeps them is the autograd graph: a backward pass takes the tables of its forward pass, and the layers of a step
share them. Where nothing is kept (no gradients, activation checkpointing), every call makes its own. So a table never
outlives the step that it was made in, and a change of ``cu_seqlens`` that torch cannot see, by a kernel of one's own or
through NumPy, has to fall between forward and backward passes to be missed, where autograd misses it as well.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_fp8.ops.attention import attention_tables

_kept: dict[Hashable, tuple[TensorWeakRef, TensorWeakRef, TensorWeakRef]] = {}
"""``cu_seqlens`` of queries and keys, and their tables."""


def on_card(device: torch.device) -> bool:
    """Whether attention on ``device`` reads tables."""
    return device.type == "cuda"


def shared_tables(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, config: str, query_rows: int, key_rows: int, device: torch.device
) -> Tensor:
    """:func:`~lightning_fp8.ops.attention.attention_tables`, the very tensor that somebody keeps if there is one.

    One is taken again for the same two tensors, unchanged since (by their version counters), on the same stream.
    Compiled code finds equal calls itself; inside a CUDA graph each call is part of the graph, since replays read what
    ``cu_seqlens`` hold then.
    """
    given = cu_seqlens_q, cu_seqlens_kv
    if torch.compiler.is_compiling() or not all(map(_is_followed, given)) or _is_captured(device):
        return attention_tables(*given, config, query_rows, key_rows, device)
    versions = tuple((id(each), each._version) for each in given)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = versions, config, query_rows, key_rows, device, stream
    if key in _kept:
        of_queries, of_keys, found = (ref() for ref in _kept[key])
        if of_queries is cu_seqlens_q and of_keys is cu_seqlens_kv and found is not None:
            return found
    for dead in [other for other, refs in _kept.items() if any(ref() is None for ref in refs)]:
        _kept.pop(dead, None)
    tables = attention_tables(*given, config, query_rows, key_rows, device)
    _kept[key] = TensorWeakRef(cu_seqlens_q), TensorWeakRef(cu_seqlens_kv), TensorWeakRef(tables)
    return tables


def _is_followed(x: Tensor) -> bool:
    """Whether a version counter follows what is written to ``x``."""
    return type(x) is Tensor and not x.is_inference()


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
