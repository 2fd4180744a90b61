"""FP8 attention, forward and backward: so far its specification in plain torch, and nothing else.

What is here states the numerics and computes them anywhere that torch runs. Registered ops, CUDA kernels, autograd and
``DotProductAttention`` are not here yet; no model reaches this room, and its names are not public.

    q8, k8, v8 = cast(q), cast(k, centered=True), cast(v)
    o, m, l = forward(q8, k8, v8, softmax_scale, causal)
    dq, dk, dv = backward(cast(do), q8, k8, v8, o, m, l, softmax_scale, causal)
"""

from lightning_fp8.ops.attention.casts import BLOCK, Codes, cast
from lightning_fp8.ops.attention.masks import Band, Lengths
from lightning_fp8.ops.attention.packed import pack, unpack
from lightning_fp8.ops.attention.reference import backward, forward
from lightning_fp8.ops.attention.tiles import KEYS, QUERIES

__all__ = ["BLOCK", "KEYS", "QUERIES", "Band", "Codes", "Lengths", "backward", "cast", "forward", "pack", "unpack"]
