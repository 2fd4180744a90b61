"""FP8 attention, forward and backward: two ops, and their specification in plain torch.

The specification defines the numerics with heads as an outer dimension, ``[B, H, L, D]``:

    q8, k8, v8 = cast(q), cast(k, centered=True, mean_rows=rows_of_mean(band)), cast(v)
    o, m, l = forward(q8, k8, v8, softmax_scale, band)
    dq, dk, dv = backward(cast(do), q8, k8, v8, o, m, l, softmax_scale, band)

The ops include the casts; see :mod:`lightning_fp8.attention.ops.attention`.
"""

from lightning_fp8.attention.ops.attention import (
    Attention,
    AttentionCall,
    Gradients,
    Kept,
    attention_backward,
    attention_forward,
    attention_tables,
)
from lightning_fp8.attention.ops.casts import BLOCK, Codes, cast, rows_of_mean
from lightning_fp8.attention.ops.codes import QueriesKept, attention_cast, attention_forward_of_codes
from lightning_fp8.attention.ops.cuda import failing_kernel, missing_kernel  # the module implements the ops
from lightning_fp8.attention.ops.layouts import FORMATS, pack, unpack
from lightning_fp8.attention.ops.masks import Band, Lengths
from lightning_fp8.attention.ops.reference import backward, forward
from lightning_fp8.attention.ops.tiles import KEYS, QUERIES

__all__ = [
    "BLOCK",
    "FORMATS",
    "KEYS",
    "QUERIES",
    "Attention",
    "AttentionCall",
    "Band",
    "Codes",
    "Gradients",
    "Kept",
    "Lengths",
    "QueriesKept",
    "attention_backward",
    "attention_cast",
    "attention_forward",
    "attention_forward_of_codes",
    "attention_tables",
    "backward",
    "cast",
    "failing_kernel",
    "forward",
    "missing_kernel",
    "pack",
    "rows_of_mean",
    "unpack",
]
